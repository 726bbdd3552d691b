//! Device end of virtio-net on split rings: no input may make it panic, hang, or touch what is not the guest's.
#![no_main]

mod device;
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| device::run(data, false, device::Deaths::None));
