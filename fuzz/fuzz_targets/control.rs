//! Commands on the control queue: any bytes, in any order. None may panic; one that is refused changes nothing; the filter that
//! results decides about any frame, and lets all pass while the driver is promiscuous.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringroad_net::{Features, control::Control};
use ringroad_wire::ethernet::MacAddr;

fuzz_target!(|input: (u64, Vec<Vec<u8>>, Vec<u8>)| {
    let (acked, commands, frame) = input;
    let acked = acked | Features::CTRL_VQ.bits();
    let mut control = Control::new(acked, MacAddr::local(1));
    for command in &commands {
        let before = control.clone();
        if control.command(command).is_err() {
            assert_eq!(control.filter(), before.filter());
            assert_eq!((control.support(), control.mac()), (before.support(), before.mac()));
        }
        let all = Control::new(acked, MacAddr::local(1)).support();
        assert!(all.contains(control.support()), "an offload that was not negotiated");
        assert!(!control.mac().is_multicast() && !control.mac().is_zero());
        let passes = control.filter().passes(&frame);
        assert!(passes || !control.filter().passes_all() || frame.len() < 6);
    }
});
