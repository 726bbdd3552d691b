//! The e1000 device against a driver that writes anything to its registers, rings and buffers, with memory that comes and goes: no
//! input may make it panic, hang, or touch what is not the guest's. Whatever has happened, the next driver finds a device that works.
#![no_main]

mod input;

use input::Input;
use ringroad_e1000::{
    Device, DeviceConfig, Effects, Interrupter, Mitigation, RxQueue, TxQueue,
    registers::{self as reg, ctrl, rctl, tctl},
};
use ringroad_frame::{
    ALL, BURST, Burst, HEADROOM, Offload, Sink, Source,
    offload::{Claim, Kind},
};
use ringroad_mem::{Region, Table};
use std::{cell::RefCell, sync::Arc};

const LEN: usize = 16384;
/// The guest's regions: two that adjoin, one apart, one in front of the last address.
const GUESTS: [u64; 4] = [0x10000, 0x14000, 0x100_0000, 0xffff_fffe_ffff_0000];
/// Rings at the start of each region, mostly.
const RING: u64 = 0;

thread_local! {
    static REGIONS: RefCell<Option<(Vec<Arc<Region>>, Arc<Table>)>> = const { RefCell::new(None) };
}

struct Machine<'a> {
    device: Device,
    tx: TxQueue,
    rx: RxQueue,
    interrupter: Interrupter,
    regions: &'a [Arc<Region>],
    /// Memory that frames of other ports lie in.
    pool: &'a Arc<Table>,
    /// Number of each region that is mapped.
    map: u8,
    burst: Burst,
    /// A burst is under way.
    busy: bool,
    now: u64,
}

impl Machine<'_> {
    fn act(&mut self, effects: Effects) {
        if effects.contains(Effects::QUIESCE) {
            self.finish(BURST);
            self.tx.quiesce();
            self.rx.quiesce();
        }
        if effects.contains(Effects::INTERRUPT) {
            self.settle();
        }
    }

    fn settle(&mut self) {
        let signal = self.interrupter.settle(self.now);
        assert!(signal.at.is_none_or(|at| at > self.now), "settled, and due at once");
    }

    /// Ends a burst of which the first frames were delivered.
    fn finish(&mut self, delivered: usize) {
        if std::mem::take(&mut self.busy) {
            self.tx.retain(&mut self.burst, delivered);
        }
    }

    fn map(&mut self, map: u8) {
        self.finish(BURST);
        self.map = map;
        let mapped = self.regions.iter().enumerate().filter(|&(n, _)| map >> n & 1 == 1);
        let table = mapped.fold(Table::default(), |table, (_, region)| table.with(region.clone()).unwrap());
        let table = (map & 0x80 == 0).then(|| Arc::new(table));
        self.tx.set_memory(table.clone()).unwrap();
        self.rx.set_memory(table);
    }

    fn write(&mut self, register: u32, value: u32) {
        let effects = self.device.write(register.into(), &value.to_le_bytes(), self.now);
        self.act(effects);
    }

    /// An address: in a region, near its ends, or anywhere.
    fn address(&self, input: &mut Input) -> u64 {
        let region = GUESTS[usize::from(input.byte()) % GUESTS.len()];
        match input.byte() {
            0 => u64::from_le_bytes(input.take()),
            1 => region + LEN as u64 - u64::from(input.byte()),
            2 => region.wrapping_sub(input.byte().into()),
            _ => region + u64::from(input.word()) % LEN as u64,
        }
    }

    /// Writes anything to the guest's memory, mostly descriptors.
    fn scribble(&self, input: &mut Input) {
        let region = &self.regions[usize::from(input.byte()) % self.regions.len()];
        let at = usize::from(input.byte()) * 16 % LEN;
        let address = self.address(input);
        // The bits of a transmit descriptor, with a short length if that is wanted.
        let mut word = u64::from_le_bytes(input.take());
        if input.byte() & 1 == 1 {
            word &= !0xf_ff00;
        }
        region.span(at, 16).unwrap().write(&[address.to_le_bytes(), word.to_le_bytes()].concat());
    }

    fn take(&mut self, input: &mut Input) {
        self.finish(BURST);
        self.busy = self.tx.take(&mut self.burst) > 0;
        if !self.busy {
            return;
        }
        let mut copy = vec![0; 70_000];
        for index in 0..self.burst.frames().len() {
            let len = self.burst.frames()[index].len();
            assert_eq!(self.burst.copy(index, 0, &mut copy[..len]), len);
            let offload = self.burst.offload(index);
            assert!(offload.longest(len) <= len.max(offload.longest(len)));
        }
        if input.byte() & 1 == 1 {
            self.finish(input.byte().into());
        }
    }

    fn put(&mut self, input: &mut Input) {
        let mut burst = Burst::default();
        burst.start_in(self.pool);
        let count = usize::from(input.byte()) % BURST;
        for _ in 0..count {
            let total = HEADROOM + 14 + input.number() as usize % 20_000;
            let offload = if input.byte() & 1 == 1 { Offload::VALID } else { Offload::NONE };
            burst.push_at(u64::from(input.byte()), total, offload).unwrap();
        }
        let which = &ALL[..count];
        let handled = if input.byte() & 1 == 1 { self.rx.offer(&burst, which) } else { self.rx.put(&burst, which) };
        assert!(handled <= count);
        self.rx.has_room(input.byte().into());
    }

    /// A frame that is to be cut or completed, whose sender may write to it once it was checked.
    fn put_unfinished(&mut self, input: &mut Input) {
        const START: u16 = 34;
        let len = 54 + input.number() as usize % 20_000;
        let pool = self.pool.regions()[0].span(HEADROOM, len).unwrap();
        let udp = input.byte() & 1 == 1;
        let (kind, offset) = if udp { (Kind::Udp4, 6) } else { (Kind::Tcp4, 16) };
        let mut head = [0; 54];
        head[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
        head[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
        head[22..24].copy_from_slice(&[64, if udp { 17 } else { 6 }]);
        head[38..40].copy_from_slice(&(len as u16 - START).to_be_bytes());
        head[46] = 0x50;
        pool.write(&head);
        let size = input.number() as u16;
        let offload = match size {
            0 => Offload::partial(START, offset, len),
            _ => Offload::segmented(Claim { kind, ecn: false, size, checksum: (START, offset) }, &head, len),
        };
        let Ok(offload) = offload else { return };
        let mut burst = Burst::default();
        burst.start_in(self.pool);
        burst.push_at(0, HEADROOM + len, offload).unwrap();
        if input.byte() & 1 == 1 {
            let at = usize::from(input.byte()) % head.len();
            pool.skip(at).write(&[input.byte()]);
        }
        let which = &ALL[..1];
        let handled = if input.byte() & 1 == 1 { self.rx.offer(&burst, which) } else { self.rx.put(&burst, which) };
        assert!(handled <= 1);
        self.rx.has_room(input.byte().into());
    }

    fn step(&mut self, input: &mut Input) {
        let mut data = [0; 16];
        let effects = match input.byte() % 14 {
            0..=2 => {
                const REGISTERS: [u32; 24] = [
                    reg::CTRL,
                    reg::RCTL,
                    reg::TCTL,
                    reg::TDBAL,
                    reg::TDBAH,
                    reg::TDLEN,
                    reg::TDH,
                    reg::TDT,
                    reg::RDBAL,
                    reg::RDBAH,
                    reg::RDLEN,
                    reg::RDH,
                    reg::RDT,
                    reg::ICS,
                    reg::IMS,
                    reg::IMC,
                    reg::ITR,
                    reg::TIDV,
                    reg::TADV,
                    reg::RDTR,
                    reg::RADV,
                    reg::RXCSUM,
                    reg::EECD,
                    reg::MDIC,
                ];
                let register = REGISTERS[usize::from(input.byte()) % REGISTERS.len()];
                let value = if input.byte() & 1 == 1 { input.number() } else { u32::from_le_bytes(input.take()) };
                self.device.write(register.into(), &value.to_le_bytes(), self.now)
            }
            3 => self.device.write(input.number().into(), &u64::from_le_bytes(input.take()).to_le_bytes(), self.now),
            4 => {
                let len = usize::from(input.byte()) % 16;
                self.device.read(input.number().into(), &mut data[..len], self.now)
            }
            5 => self.device.io_write(u64::from(input.byte()) % 8, &input.take::<4>(), self.now),
            6 => self.device.config_write(u64::from(input.byte()), &input.take::<4>(), self.now),
            7 => self.device.set_link(input.byte() & 1 == 1, self.now),
            8 => {
                self.now += u64::from(input.number());
                Effects::INTERRUPT
            }
            9 => {
                self.map(input.byte());
                Effects::empty()
            }
            10 => {
                self.take(input);
                Effects::empty()
            }
            11 => {
                self.put(input);
                Effects::empty()
            }
            12 => {
                self.put_unfinished(input);
                Effects::empty()
            }
            _ => {
                self.scribble(input);
                Effects::empty()
            }
        };
        self.act(effects);
    }

    /// Resets the device and sends one frame each way.
    fn works(&mut self) {
        let effects = self.device.reset();
        self.act(effects);
        self.device.set_link(true, self.now);
        self.map(1);
        let region = &self.regions[0];
        region.span(0, 16).unwrap().write(&[(GUESTS[0] + 8192).to_le_bytes(), [60, 0, 0, 0x0b, 0, 0, 0, 0]].concat());
        region.span(4096, 16).unwrap().write(&[(GUESTS[0] + 8192).to_le_bytes(), [0; 8]].concat());
        let effects = self.device.config_write(4, &[7, 0], self.now);
        self.act(effects);
        for (first, base) in [(reg::TDBAL, RING), (reg::RDBAL, 4096)] {
            self.write(first, GUESTS[0] as u32 + base as u32);
            self.write(first + 8, 128);
        }
        for (register, value) in [
            (reg::CTRL, ctrl::SLU),
            (reg::TCTL, tctl::EN),
            (reg::RCTL, rctl::EN | rctl::UPE | rctl::MPE),
            (reg::TDT, 1),
            (reg::RDT, 7),
        ] {
            self.write(register, value);
        }
        assert_eq!(self.tx.take(&mut self.burst), 1);
        assert_eq!(self.rx.put(&self.burst, &ALL[..1]), 1);
        self.tx.done(&mut self.burst);
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    REGIONS.with_borrow_mut(|regions| {
        let (regions, pool) = regions.get_or_insert_with(|| {
            let regions = GUESTS.iter().map(|&guest| Region::private(LEN, guest).unwrap()).collect();
            let pool = Arc::new(Table::default().with(Region::private(32768, 0).unwrap()).unwrap());
            (regions, pool)
        });
        let mut input = Input(data);
        let bits = input.byte();
        let mitigation = Mitigation { enabled: bits & 1 == 1, clamp_itr: bits & 2 == 2 };
        let (device, tx, rx) = Device::new(DeviceConfig { mitigation, ..DeviceConfig::default() }).unwrap();
        let interrupter = device.interrupter();
        let (burst, busy, now) = (Burst::default(), false, 0);
        let mut machine = Machine { device, tx, rx, interrupter, regions, pool, map: 0, burst, busy, now };
        machine.map(0xf);
        // Half of the inputs begin with a device that is set up.
        if bits & 4 == 4 {
            machine.works();
            machine.map(0xf);
        }
        while !input.is_empty() {
            machine.step(&mut input);
        }
        machine.finish(BURST);
        machine.works();
    });
});
