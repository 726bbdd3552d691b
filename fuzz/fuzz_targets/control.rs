//! Commands on the control queue: any bytes, in any order. None may panic; one that is refused changes nothing; the filter that
//! results decides about any frame, and lets all pass while the driver is promiscuous.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringroad_frame::{Flow, Snapshot};
use ringroad_net::{
    Features,
    control::{Change, Control, Interrupts, MAX_COMMAND, Queues},
    rss::HashReport,
};
use ringroad_wire::ethernet::MacAddr;
use std::time::Duration;

const PAIRS: u16 = 2;

struct Four;

impl Queues for Four {
    fn runs(&self, index: u16) -> bool {
        index < 4
    }

    fn counted(&self, index: u16) -> Snapshot {
        Snapshot { frames: index.into(), partial: u64::MAX / 2, valid: u64::MAX / 2, ..Snapshot::default() }
    }
}

fuzz_target!(|input: (u64, Vec<Vec<u8>>, Vec<u8>)| {
    let (acked, commands, frame) = input;
    let acked = acked | Features::CTRL_VQ.bits();
    let mut control = Control::new(acked, MacAddr::local(1), PAIRS);
    for command in &commands {
        let before = control.clone();
        let interrupts = |control: &Control| std::array::from_fn::<_, 8, _>(|queue| control.interrupts(queue as u16));
        let done = control.command(command, &Four);
        if let Ok(Change::Statistics(reply)) = &done {
            assert!(reply.len() <= 10 * MAX_COMMAND, "a reply without bounds");
        }
        match done {
            Err(_) | Ok(Change::Reply(_) | Change::Statistics(_)) => {
                assert_eq!(control.filter(), before.filter());
                assert_eq!((control.support(), control.mac()), (before.support(), before.mac()));
                assert_eq!(interrupts(&control), interrupts(&before));
                assert_eq!(control.pairs(), before.pairs());
            }
            Ok(_) => {}
        }
        let limits = interrupts(&control).into_iter().flatten().map(Interrupts::limits);
        assert!({ limits }.all(|limits| limits.delay <= Duration::from_secs(1)));
        let all = Control::new(acked, MacAddr::local(1), PAIRS).support();
        assert!(all.contains(control.support()), "an offload that was not negotiated");
        assert!((1..=PAIRS).contains(&control.pairs()));
        if let Some(rss) = control.rss() {
            let flow = Flow::parse(&frame);
            assert!(rss.queue(flow.as_ref()) < control.pairs());
        }
        if let Some(hash) = control.hash() {
            let report = Flow::parse(&frame).map_or(HashReport::NONE, |flow| hash.report(&flow));
            assert!(hash.types.contains(report.types) && report.types.iter().count() <= 1);
            assert_eq!(HashReport::from_bytes(report.bytes()), report);
        }
        assert!(!control.mac().is_multicast() && !control.mac().is_zero());
        let passes = control.filter().passes(&frame);
        assert!(passes || !control.filter().passes_all() || frame.len() < 6);
    }
});
