//! Cards as ports of a switch, over their sockets: what a client leaves behind when it goes.

#[expect(dead_code, reason = "parts for other tests")]
mod common;

use common::{Folder, GENEROUS, PATIENCE, held, identity, keep_log, within};
use ringroad_e1000::{
    driver::{Bus, Driver, DriverConfig},
    registers as reg,
};
use ringroad_host::{
    PortSettings, Worker, WorkerConfig,
    e1000::{E1000Config, E1000Port, E1000Server},
    vfio_user::{CONFIG_REGION, Client},
};
use ringroad_mem::{Region, Span};
use ringroad_switch::Limits;
use ringroad_wire::ethernet::MacAddr;
use std::{fs::File, path::PathBuf, sync::Arc};

/// Positions in configuration space: the command register, and I/O, memory and bus master in it.
const COMMAND: u64 = 4;
const ENABLE: u16 = 7;

/// A switch with three cards.
struct Rig {
    servers: Vec<E1000Server<E1000Port>>,
    folder: Folder,
    _worker: Worker<E1000Port>,
}

impl Rig {
    fn new(name: &str) -> Rig {
        keep_log();
        let worker = Worker::start(WorkerConfig::default()).unwrap();
        let folder = Folder::new(name);
        // Frames to a card that has gone are flooded, and as many as these tests send exceed the default limit.
        let limits = Limits { storm: 0, ..Limits::GUEST };
        let start = |index: u32| {
            let config = E1000Config {
                name: format!("{name}{index}"),
                socket: folder.file(&format!("{index}.sock")),
                mac: MacAddr::local(index + 1),
                client: GENEROUS,
                settings: PortSettings { limits, ..PortSettings::default() },
                ..E1000Config::default()
            };
            E1000Server::start(config, &worker, |port| port).unwrap()
        };
        Rig { servers: (0..3).map(start).collect(), folder, _worker: worker }
    }

    fn socket(&self, port: usize) -> PathBuf {
        self.folder.file(&format!("{port}.sock"))
    }
}

/// Access to the registers of a card, each with a reply.
struct Wire(Client);

impl Bus for Wire {
    fn read(&mut self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.0.read(0, register.into(), &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, register: u32, value: u32) {
        self.0.write(0, register.into(), &value.to_le_bytes()).unwrap();
    }
}

/// A guest that receives all frames.
struct Guest {
    driver: Driver,
    bus: Wire,
    mac: MacAddr,
    sent: u64,
}

impl Guest {
    fn new(rig: &Rig, port: usize) -> Guest {
        Guest::of(Client::connect(&rig.socket(port), PATIENCE).unwrap())
    }

    fn of(client: Client) -> Guest {
        let config = DriverConfig { num_tx_desc: 256, num_rx_desc: 256, itr: 0, ..DriverConfig::default() };
        let (mut driver, mut bus) = (Driver::new(config).unwrap(), Wire(client));
        bus.0.map(&driver.region, &driver.file, true).unwrap();
        bus.0.write(CONFIG_REGION, COMMAND, &ENABLE.to_le_bytes()).unwrap();
        let mac = driver.probe(&mut bus).unwrap();
        driver.start(&mut bus);
        driver.set_promiscuous(&mut bus, true);
        Guest { driver, bus, mac, sent: 0 }
    }

    /// Sends frames; returns the number of the last one.
    fn send(&mut self, to: MacAddr, count: u32) -> u64 {
        let Guest { driver, bus, mac, sent } = self;
        driver.reclaim();
        let added = driver.add(count, |space| {
            *sent += 1;
            let frame = [&to.0[..], &mac.0, &[0x88, 0xb5], &sent.to_be_bytes(), &[0; 38]].concat();
            space.write(&frame)
        });
        assert_eq!(added, count);
        driver.publish(bus, 0);
        self.sent
    }

    /// Returns source and number of the frames that have arrived.
    fn received(&mut self) -> Vec<(MacAddr, u64)> {
        let mut all = Vec::new();
        let known =
            |parts: &[Span<'_>]| (MacAddr(parts[0].array(6).unwrap()), u64::from_be_bytes(parts[0].array(14).unwrap()));
        self.driver.receive(&mut self.bus, |parts| all.push(known(parts)));
        all
    }

    /// Waits for a frame; returns what has arrived by then.
    #[track_caller]
    fn receives(&mut self, from: MacAddr, number: u64) -> Vec<(MacAddr, u64)> {
        let mut all = Vec::new();
        let arrived = within(PATIENCE, || {
            all.extend(self.received());
            all.contains(&(from, number))
        });
        assert!(arrived, "frame {number} from {from} to {} was lost", self.mac);
        all
    }
}

/// Has both send frames to each other.
#[track_caller]
fn exchange(a: &mut Guest, b: &mut Guest) {
    for _ in 0..2 {
        let number = a.send(b.mac, 1);
        b.receives(a.mac, number);
        let number = b.send(a.mac, 1);
        a.receives(b.mac, number);
    }
}

/// Returns whether the switch knows where this address is: the other guest does not see frames to it.
#[track_caller]
fn knows(from: &mut Guest, to: MacAddr, other: &mut Guest) -> bool {
    let number = from.send(to, 1);
    let last = from.send(MacAddr::BROADCAST, 1);
    !other.receives(from.mac, last).contains(&(from.mac, number))
}

/// Registers that a driver sets, and what they are after power-on.
const RESET: [(u32, u32); 6] =
    [(reg::RCTL, 0), (reg::TCTL, 0), (reg::IMS, 0), (reg::RDT, 0), (reg::RDLEN, 0), (reg::TDLEN, 0)];

#[test]
fn a_client_that_is_killed_in_the_middle_of_traffic() {
    let rig = Rig::new("killed-card");
    let (mut b, mut c) = (Guest::new(&rig, 1), Guest::new(&rig, 2));
    for round in 0..20 {
        let mut a = Guest::new(&rig, 0);
        exchange(&mut a, &mut b);
        assert!(knows(&mut b, a.mac, &mut c), "round {round}: its address is known");
        // The memory of the driver itself.
        let (file, own) = (identity(&a.driver.file), (1, 1));
        assert_ne!(held(file), own);
        a.send(b.mac, 200);
        b.send(a.mac, 200);
        let Guest { driver, bus, mac, .. } = a;
        drop(bus);
        assert!(within(PATIENCE, || held(file) == own), "{:?}", held(file));
        drop(driver);

        // Nobody is there: frames to it go to whoever may have it now.
        assert!(within(PATIENCE, || !knows(&mut b, mac, &mut c)), "round {round}: its address is still known");
        let mut client = Client::connect(&rig.socket(0), PATIENCE).unwrap();
        let (memory, file) = memory_of_the_next_guest();
        client.map(&memory, &file, true).unwrap();
        let last = b.send(MacAddr::BROADCAST, 1);
        c.receives(b.mac, last);
        let mut bytes = vec![0; memory.len()];
        memory.span(0, bytes.len()).unwrap().read(&mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0), "the card wrote where the last guest had its buffers");
        // As after power-on.
        let mut command = [0xff; 2];
        client.read(CONFIG_REGION, COMMAND, &mut command).unwrap();
        assert_eq!(command, [0; 2]);
        let mut bus = Wire(client);
        assert_eq!(RESET.map(|(register, _)| (register, bus.read(register))), RESET);
        bus.0.unmap_all().unwrap();
        exchange(&mut Guest::of(bus.0), &mut b);
        // Nothing of this round is left for the next one.
        b.received();
        c.received();
    }
}

/// Zeros where a driver had its rings and buffers.
fn memory_of_the_next_guest() -> (Arc<Region>, File) {
    let driver = Driver::new(DriverConfig::default()).unwrap();
    Region::create(driver.region.len(), driver.region.guest(), false).unwrap()
}

#[test]
fn a_card_without_a_link_keeps_no_address() {
    let rig = Rig::new("unplugged-card");
    let [mut a, mut b, mut c] = [0, 1, 2].map(|port| Guest::new(&rig, port));
    exchange(&mut a, &mut b);
    assert!(knows(&mut b, a.mac, &mut c));
    rig.servers[0].set_link(false);
    assert!(within(PATIENCE, || !knows(&mut b, a.mac, &mut c)));
    rig.servers[0].set_link(true);
    assert!(within(PATIENCE, || a.driver.has_link(&mut a.bus)));
    exchange(&mut a, &mut b);
    assert!(knows(&mut b, a.mac, &mut c));
}
