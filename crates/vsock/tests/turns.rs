//! Guests take turns at another guest's receive ring, whatever they send: no flood of control packets holds up the data of others.
#![cfg(not(loom))]

mod common;

use common::{
    GUEST,
    raw::{Guest, PACKED, PORT, SPLIT, Shape, Side, listener},
};
use ringroad_vsock::Hub;
use ringroad_wire::vsock_hdr::{Op, SIZE, VsockHdr};
use std::{io::Write, sync::Arc};

const BUFFER: u32 = 4096 + SIZE as u32;
/// Packets of data for the receiver from each of two others, one buffer each.
const PACKETS: usize = 32;
/// Connections that the flooder opens and resets per round: more than fit into the receiver's buffers.
const FLOOD: u32 = 64;
const RECEIVER: u64 = 4;
const SENDER: u64 = 5;

fn member(hub: &Arc<Hub<Side>>, cid: u64, acked: u64, buffers: usize) -> Guest {
    let guest = Guest::bare(Shape { cid, acked, buffers: vec![vec![BUFFER]; buffers], ..Shape::default() });
    hub.join(&guest.host, vec!["x".into()]);
    guest
}

/// A guest that opens connections to the receiver and resets them in the next round.
struct Flooder {
    guest: Guest,
    round: u32,
}

impl Flooder {
    fn flood(&mut self) {
        let header = |op, port| VsockHdr { dst_cid: RECEIVER, ..self.guest.header(op, port, 80) };
        let ports = |round: u32| (0..FLOOD).map(move |number| 1000 + round % 2 * FLOOD + number);
        let resets: Vec<_> = ports(self.round + 1).map(|port| header(Op::Reset, port)).collect();
        let requests: Vec<_> = ports(self.round).map(|port| header(Op::Request, port)).collect();
        resets.into_iter().chain(requests).for_each(|header| self.guest.send(header, &[]));
        while self.guest.host.work() {}
        self.round += 1;
    }
}

/// Lets the receiver offer `step` buffers at a time while `flood` causes control packets for it, until it has all data that
/// another guest and a program of the host have for it.
fn flooded(hub: &Arc<Hub<Side>>, acked: u64, step: usize, mut flood: impl FnMut(&mut Guest)) {
    let mut receiver = member(hub, RECEIVER, acked, 2);
    let mut sender = member(hub, SENDER, acked, 32);
    let listener = listener(&receiver);
    let program = receiver.connect(&listener, 5, PORT);
    let across = |from: &Guest, op, to: &Guest| VsockHdr { dst_cid: to.cid, ..from.header(op, 7, 7) };
    assert_eq!(sender.exchange(across(&sender, Op::Request, &receiver), &[]), []);
    assert_eq!(receiver.receive().len(), 1);
    receiver.exchange(across(&receiver, Op::Response, &sender), &[]);
    assert_eq!(sender.receive().len(), 1);

    flood(&mut receiver);
    let bytes = vec![1; PACKETS * 4096];
    assert_eq!((&program).write(&bytes).unwrap(), bytes.len());
    sender.send(VsockHdr { len: bytes.len() as u32, ..across(&sender, Op::Data, &receiver) }, &bytes);
    while sender.host.work() {}
    receiver.host.work();
    let (mut left, mut offered, mut control) = ([bytes.len(); 2], 0, 0);
    while left != [0; 2] {
        // The others have a third of the buffers each; some overtake, and some stay reserved.
        assert!(offered <= 3 * 2 * PACKETS, "{left:?} bytes not received, but {control} control packets");
        flood(&mut receiver);
        (0..step).for_each(|_| receiver.post(&[BUFFER]));
        offered += step;
        while receiver.host.work() {}
        for (packet, _) in receiver.collect() {
            control += usize::from(packet.payload.is_empty());
            left[usize::from(packet.header.src_cid == SENDER)] -= packet.payload.len();
        }
    }
    // The flood has its turns as well.
    assert!(control >= PACKETS / 2, "{control}");
}

const STEPS: [usize; 3] = [1, 7, 32];

#[test]
fn a_flood_of_control_packets_does_not_starve_the_data_of_others() {
    for (acked, step) in [SPLIT, PACKED].into_iter().flat_map(|acked| STEPS.map(|step| (acked, step))) {
        let hub = Hub::new(1000);
        let mut flooder = Flooder { guest: member(&hub, GUEST, acked, 32), round: 0 };
        flooded(&hub, acked, step, |_| flooder.flood());
    }
}

/// They are a group of their own.
#[test]
fn answers_to_packets_of_no_connection_take_turns_with_data() {
    for (acked, step) in [SPLIT, PACKED].into_iter().flat_map(|acked| STEPS.map(|step| (acked, step))) {
        flooded(&Hub::new(1000), acked, step, |receiver| {
            let headers: Vec<_> = (0..FLOOD).map(|port| receiver.header(Op::CreditUpdate, 1000 + port, 80)).collect();
            headers.into_iter().for_each(|header| receiver.send(header, &[]));
            while receiver.host.work() {}
        });
    }
}
