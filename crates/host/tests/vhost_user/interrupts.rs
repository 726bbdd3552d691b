//! Interrupts that wait: for sent frames by default, for both as long as the driver asks for. Frames do not wait.

use crate::{LAYOUTS, common::*};
use ringroad_host::{
    PortSettings,
    vhost_user::{CommandError, Connection},
};
use ringroad_net::{
    Features, bits,
    control::{Command, Interrupts},
};
use ringroad_wire::ethernet::MacAddr;
use std::{
    thread,
    time::{Duration, Instant},
};
use vmm_sys_util::eventfd::EventFd;

const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);
/// No interrupt comes within this time.
const QUIET: Duration = Duration::from_millis(30);
const LONG: Duration = Duration::from_secs(8);

fn set_delay(rig: &Rig, port: usize, interrupt_delay: Duration) {
    let handle = rig.servers[port].handle();
    handle.set(PortSettings { interrupt_delay, ..handle.port().settings() });
}

/// Returns whether the device has notified, and clears that.
fn called(call: &EventFd) -> bool {
    call.read().is_ok()
}

fn within_time(call: &EventFd, time: Duration) -> bool {
    within(time, || called(call))
}

/// Sends frames whose buffers are to be notified, and waits until they arrive.
fn send(a: &mut Guest, b: &mut Guest, count: usize) {
    while a.driver.tx[0].enable_notification() {
        a.driver.tx[0].reclaim().unwrap();
    }
    called(&a.vrings[1].call);
    for _ in 0..count {
        let sequence = a.send_to(b.mac);
        assert!(b.receives(a.mac, sequence));
    }
}

#[test]
fn interrupts_for_sent_frames_wait_for_more_but_not_for_long() {
    let rig = Rig::new("interrupts");
    for layout in LAYOUTS {
        let (mut a, mut b) = (rig.guest(1, layout), rig.guest(2, layout));
        exchange(&mut a, &mut b);
        // Not at all.
        set_delay(&rig, 1, Duration::ZERO);
        send(&mut a, &mut b, 1);
        assert!(within_time(&a.vrings[1].call, PATIENCE));
        // For a while: the frame is there long before.
        set_delay(&rig, 1, Duration::from_millis(200));
        let begun = Instant::now();
        send(&mut a, &mut b, 1);
        let arrived = begun.elapsed();
        assert!(within_time(&a.vrings[1].call, PATIENCE));
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(199) && arrived < took / 2, "{arrived:?}, {took:?}");
        // Up to half the ring, however long the time is.
        set_delay(&rig, 1, LONG);
        let begun = Instant::now();
        let half = a.size as usize / 2;
        send(&mut a, &mut b, half - 1);
        assert!(!within_time(&a.vrings[1].call, QUIET));
        let sequence = a.send_to(b.mac);
        assert!(b.receives(a.mac, sequence) && within_time(&a.vrings[1].call, PATIENCE));
        // A shorter time applies to what waits.
        send(&mut a, &mut b, 1);
        assert!(!within_time(&a.vrings[1].call, QUIET));
        set_delay(&rig, 1, Duration::from_millis(1));
        assert!(within_time(&a.vrings[1].call, PATIENCE) && begun.elapsed() < LONG);
        assert_eq!(rig.faults(), 0);
    }
}

/// A TCP segment between two guests, with this many bytes of data.
fn segment(from: &Guest, to: &Guest, data: usize) -> Vec<u8> {
    let total = (40 + data as u16).to_be_bytes();
    let ip = [&[0x45, 0], &total[..], &[0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]].concat();
    let tcp = [&[0; 12][..], &[0x50, 0x10, 0, 0, 0, 0, 0, 0]].concat();
    [&to.mac.0[..], &from.mac.0, &[8, 0], &ip, &tcp, &vec![7; data]].concat()
}

/// Two guests, of which one sends to the other, which acknowledges.
struct Transfer<'a> {
    rig: &'a Rig,
    a: Guest,
    b: Guest,
}

impl Transfer<'_> {
    /// The driver takes what has come, and asks to be notified.
    fn takes(&mut self) {
        self.a.driver.rx[0].receive(true, |_| ()).unwrap();
        assert!(!self.a.driver.rx[0].enable_notification());
        called(&self.a.vrings[0].call);
    }

    /// It sends 96 KB, which the other one acknowledges. Returns how long it takes until it is notified of that, if within this time.
    fn round(&mut self, time: Duration) -> Option<Duration> {
        let (frame, ack) = (segment(&self.a, &self.b, 1460), segment(&self.b, &self.a, 0));
        for _ in 0..64 {
            assert!(within(PATIENCE, || self.a.add_frame(&frame)));
        }
        let before = self.rig.report(1).sent.frames;
        self.a.vrings[1].kick.write(1).unwrap();
        let (mut there, b) = (0, &mut self.b);
        assert!(within(PATIENCE, || {
            there += b.driver.rx[0].receive(true, |_| ()).unwrap();
            there >= 64
        }));
        assert!(within(PATIENCE, || b.add_frame(&ack)));
        b.vrings[1].kick.write(1).unwrap();
        assert!(within(PATIENCE, || self.rig.report(1).sent.frames > before));
        let begun = Instant::now();
        loop {
            if called(&self.a.vrings[0].call) {
                return Some(begun.elapsed());
            }
            if begun.elapsed() >= time {
                return None;
            }
            thread::yield_now();
        }
    }

    /// Returns the shortest time to a notification of several rounds.
    fn shortest(&mut self) -> Duration {
        let times = (0..5).map(|_| {
            let time = self.round(PATIENCE).expect("what waits is notified of in the end");
            self.takes();
            time
        });
        times.min().unwrap()
    }
}

#[test]
fn acknowledgements_wait_if_the_driver_sends_more_that_way() {
    const DELAY: Duration = Duration::from_millis(10);
    let rig = Rig::new("acks");
    for layout in LAYOUTS.map(|layout| layout | bits::EVENT_IDX) {
        let (mut a, mut b) = (rig.guest(1, layout), rig.guest(2, layout));
        exchange(&mut a, &mut b);
        set_delay(&rig, 1, DELAY);
        let mut transfer = Transfer { rig: &rig, a, b };
        transfer.takes();
        assert!(transfer.shortest() < DELAY / 2, "before the first trial");
        // An interrupt costs it a millisecond, in which it does not send.
        let interrupts = |transfer: &mut Transfer<'_>, rounds: usize| {
            let interrupted = (0..rounds).filter(|_| {
                let interrupted = transfer.round(Duration::from_micros(50)).is_some();
                if interrupted {
                    thread::sleep(Duration::from_millis(1));
                    transfer.takes();
                }
                interrupted
            });
            interrupted.count()
        };
        let mut last = 0;
        let fewer = within(PATIENCE, || {
            last = interrupts(&mut transfer, 100);
            last < 50
        });
        assert!(fewer, "{last} interrupts in 100 rounds");
        transfer.shortest();
        set_delay(&rig, 1, Duration::ZERO);
        assert!(transfer.shortest() < DELAY / 2, "without a delay");
        assert_eq!(rig.faults(), 0);
    }
}

fn command(connection: &mut Connection, command: Command<'_>) {
    connection.command(&command, PATIENCE).unwrap_or_else(|error| panic!("{command:?}: {error}"));
}

/// Returns whether the receive queue notifies within this time.
fn receives_call(connection: &Connection, time: Duration) -> bool {
    let begun = Instant::now();
    connection.rx[0].wait(time).unwrap();
    begun.elapsed() < time
}

fn receive(connection: &mut Connection) -> usize {
    let rx = &mut connection.driver.rx[0];
    let count = std::iter::from_fn(|| Some(rx.receive(true, |_| ()).unwrap()).filter(|&got| got > 0)).sum();
    assert!(!rx.enable_notification());
    count
}

#[test]
fn the_driver_sets_how_long_interrupts_wait() {
    for layout in LAYOUTS {
        let rig = Rig::new(&format!("coalesce{layout:x}"));
        let mut other = rig.guest(1, SPLIT);
        let control = Features::CONTROL - Features::CTRL_RX;
        let mut connection = rig.connector(layout | bits::EVENT_IDX | control.bits()).connect().unwrap();
        let at_once = Interrupts::default();
        assert_eq!(connection.interrupts(0, PATIENCE).unwrap(), at_once, "nothing was set");
        let some = Interrupts { packets: 5, micros: 1_000_000 };
        command(&mut connection, Command::ReceiveInterrupts(some));
        assert_eq!(connection.interrupts(0, PATIENCE).unwrap(), some);
        assert_eq!(connection.interrupts(1, PATIENCE).unwrap(), at_once);
        let arrives = |connection: &mut Connection, other: &mut Guest, count: u64| {
            receive(connection);
            connection.rx[0].clear();
            let before = rig.report(0).sent.frames;
            (0..count).for_each(|_| _ = other.send_to(OURS));
            assert!(within(PATIENCE, || rig.report(0).sent.frames == before + count));
        };
        arrives(&mut connection, &mut other, 4);
        assert!(!receives_call(&connection, QUIET), "4 of 5");
        other.send_to(OURS);
        assert!(receives_call(&connection, PATIENCE), "the fifth");
        // The limits change while some wait.
        arrives(&mut connection, &mut other, 3);
        assert!(!receives_call(&connection, QUIET));
        command(&mut connection, Command::QueueInterrupts(0, Interrupts { packets: 2, ..some }));
        assert!(receives_call(&connection, PATIENCE / 2));
        // By time alone.
        command(&mut connection, Command::QueueInterrupts(0, Interrupts { packets: 1000, micros: 100_000 }));
        receive(&mut connection);
        let begun = Instant::now();
        arrives(&mut connection, &mut other, 2);
        assert!(receives_call(&connection, PATIENCE) && begun.elapsed() >= Duration::from_millis(99));
        assert_eq!(receive(&mut connection), 2);
        // What cannot be set.
        for wrong in [
            Command::QueueInterrupts(2, some),
            Command::QueueInterrupts(9, some),
            Command::TransmitInterrupts(Interrupts { micros: u32::MAX, ..some }),
        ] {
            let refused = connection.command(&wrong, PATIENCE);
            assert!(matches!(refused, Err(CommandError::Refused)), "{wrong:?}: {refused:?}");
        }
        assert!(matches!(connection.interrupts(7, PATIENCE), Err(CommandError::Refused)));
        // The next driver starts over.
        drop(connection);
        let mut connection = rig.connector(layout | bits::EVENT_IDX | control.bits()).connect().unwrap();
        assert_eq!(connection.interrupts(0, PATIENCE).unwrap(), at_once);
        arrives(&mut connection, &mut other, 1);
        assert!(receives_call(&connection, PATIENCE));
        assert_eq!(rig.faults(), 0);
    }
}
