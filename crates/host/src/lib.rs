//! All that touches the kernel: vhost-user sockets, TAP, threads, epoll
