//! virtio-net, device and driver end, and the ports that a switch connects
