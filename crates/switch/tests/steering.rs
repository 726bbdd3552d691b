//! Ports with several queues: where flows go.

mod common;

use common::{Bytes, GROUP, Net, frame, mac};
use std::{sync::atomic::Ordering::Relaxed, time::Duration};

const WAIT: Duration = Duration::from_millis(5);

/// Ports whose addresses are known; the second has this many queues.
fn net(ports: usize, queues: usize) -> Net {
    let mut net = Net::new(ports);
    for port in 0..ports {
        net.send_one(port, GROUP, mac(port));
    }
    net.ports.iter().for_each(|port| port.retains.store(true, Relaxed));
    net.ports[1].queues.store(queues, Relaxed);
    net.ports[1].chosen.lock().unwrap().clear();
    net
}

/// UDP from one port to another, of the flow with this number, which holds for both directions.
fn udp(from: usize, to: usize, flow: u16) -> Bytes {
    let ports = [5201 * u16::from(from == 1), flow + 10_000, 5201 * u16::from(from == 0)];
    let ports = if from == 1 { [ports[0], ports[1]] } else { [ports[1], ports[2]] };
    let hosts = [from, to].map(|host| [10, 0, 0, host as u8]);
    let ip = [8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
    let ports = ports.map(u16::to_be_bytes);
    [&mac(to).0[..], &mac(from).0, &ip, hosts.as_flattened(), ports.as_flattened(), &[0; 22]].concat()
}

/// Port 0 sends a frame of each flow to port 1. Returns which queues are chosen, by flow.
fn chosen(net: &mut Net, flows: std::ops::Range<u16>) -> Vec<usize> {
    let all: Vec<u16> = flows.collect();
    let mut queues = vec![usize::MAX; all.len()];
    for (part, places) in all.chunks(60).zip(queues.chunks_mut(60)) {
        let frames: Vec<_> = part.iter().map(|&flow| udp(0, 1, flow)).collect();
        let got = net.send(0, &frames);
        let chosen = std::mem::take(&mut *net.ports[1].chosen.lock().unwrap());
        assert_eq!((got[1].len(), chosen.len()), (part.len(), part.len()));
        for (frame, queue) in got[1].iter().zip(chosen) {
            let index = frames.iter().position(|sent| sent == frame).unwrap();
            assert_eq!(std::mem::replace(&mut places[index], queue), usize::MAX, "once");
        }
    }
    queues
}

#[test]
fn flows_are_distributed_and_stay_in_their_queues() {
    let mut net = net(3, 4);
    let first = chosen(&mut net, 0..120);
    (0..4).for_each(|queue| assert!(first.contains(&queue), "{first:?}"));
    assert_eq!(chosen(&mut net, 0..120), first);
    // Within a queue, and so within a flow, the order stays.
    let frames: Vec<_> = (0..60).map(|number| [udp(0, 1, number % 7), vec![number as u8]].concat()).collect();
    let got = &net.send(0, &frames)[1];
    let chosen = std::mem::take(&mut *net.ports[1].chosen.lock().unwrap());
    for queue in 0..4 {
        let of_queue = got.iter().zip(&chosen).filter(|(_, chosen)| **chosen == queue);
        assert!(of_queue.map(|(frame, _)| frame.last()).is_sorted());
    }
    // What is no flow goes to the first queue, and so does everything if there is one.
    net.send(0, &[frame(mac(1), mac(0), 9), frame(GROUP, mac(0), 9)]);
    assert_eq!(std::mem::take(&mut *net.ports[1].chosen.lock().unwrap()), [0, 0]);
    net.ports[1].queues.store(2, Relaxed);
    assert!(self::chosen(&mut net, 0..120).iter().all(|&queue| queue < 2));
}

#[test]
fn flooded_flows_are_distributed_as_well() {
    let mut net = net(3, 4);
    let flood = |net: &mut Net| {
        let to_all = |flow| [&GROUP.0[..], &udp(0, 1, flow)[6..]].concat();
        let got = net.send(0, &(0..60).map(to_all).collect::<Vec<_>>());
        assert_eq!((got[1].len(), got[2].len()), (60, 60));
        let mut queues = std::mem::take(&mut *net.ports[1].chosen.lock().unwrap());
        queues.dedup();
        queues
    };
    assert_eq!(flood(&mut net).len(), 4, "a lock for each queue");
}

#[test]
fn flows_return_to_the_queue_that_they_came_from() {
    let mut net = net(3, 4);
    let before = chosen(&mut net, 0..20);
    for turn in 1..4 {
        for flow in 0..20 {
            let queue = (before[usize::from(flow)] + turn) % 4;
            net.ports[1].to_send.lock().unwrap().push_back(vec![udp(1, 0, flow)]);
            // The ports of these tests have one lease.
            net.switch.settle(Duration::ZERO);
            assert_eq!(net.carry(1, queue), 1);
            // At once: another flow may have the same place in the table.
            assert_eq!(chosen(&mut net, flow..flow + 1), [queue]);
        }
    }
}

#[test]
fn a_queue_that_is_full_keeps_its_own_bound() {
    let mut net = net(4, 2);
    let queues = chosen(&mut net, 0..120);
    let flow = |queue: usize| queues.iter().position(|&chosen| chosen == queue).unwrap() as u16;
    let (dead, live) = (flow(1), flow(0));
    net.ports[1].closed.lock().unwrap().push(1);
    let at = |micros: u64| Duration::from_secs(1) + Duration::from_micros(micros);
    let carry = |net: &mut Net, from: u32, now| {
        let frames = net.switch.carry(from, 0, now).frames;
        (frames, net.switch.take_waiting().map(|wait| (wait.port, wait.until)))
    };
    // The first frame is for the queue that takes some, the others wait.
    let burst = [udp(0, 1, live), udp(0, 1, dead), udp(0, 1, live)];
    net.ports[0].to_send.lock().unwrap().push_back(burst.to_vec());
    let wait = Some((Some(1), at(0) + WAIT));
    let (done, waiting) = carry(&mut net, 0, at(0));
    assert_eq!(waiting, None, "frames behind it were delivered: it cannot wait");
    assert_eq!((done, net.ports[1].full.load(Relaxed)), (3, 1));
    net.ports[0].to_send.lock().unwrap().push_back(vec![udp(0, 1, live), udp(0, 1, dead)]);
    assert_eq!(carry(&mut net, 0, at(10)), (1, wait));
    // Others are served meanwhile, which does not prolong the wait.
    for micros in (1000..5000).step_by(1000) {
        net.ports[2]
            .to_send
            .lock()
            .unwrap()
            .push_back(vec![[&udp(0, 1, live)[..6], &mac(2).0, &udp(0, 1, live)[12..]].concat()]);
        assert_eq!(carry(&mut net, 2, at(micros)), (1, None));
        assert_eq!(carry(&mut net, 0, at(micros + 1)), (0, wait));
    }
    assert_eq!(carry(&mut net, 0, at(5001)), (1, None));
    assert_eq!(net.ports[1].full.load(Relaxed), 2);
}

#[test]
fn frames_are_not_poured_where_flows_must_be_read() {
    let mut net = net(2, 1);
    net.ports[0].pours.store(true, Relaxed);
    net.send(0, &[udp(0, 1, 1)]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 1);
    net.ports[1].queues.store(2, Relaxed);
    net.send(0, &[udp(0, 1, 1)]);
    assert_eq!(net.ports[0].poured.load(Relaxed), 1);
}
