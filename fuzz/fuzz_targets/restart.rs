//! Device end of virtio-net, killed and started anew at any time: whatever the guest has made of its rings and its frontend of the
//! inflight region, a successor must not panic, hang, or touch what is not the guest's.
#![no_main]

mod device;
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some((layout, data)) = data.split_first() {
        device::run(data, layout & 1 == 1, device::Deaths::Any);
    }
});
