//! One run of each case, with our driver on a device.

use super::{
    args::Args,
    devices::{Count, GUEST, PATIENCE, PEER_RECEIVE, Vsock, add, connect},
};
use crate::vsock_ends::message;
use ringroad_host::vsock::VsockClient;
use ringroad_traffic::{
    gbps,
    options::{Ring, pin},
    vsock::{RECEIVE, each_read, layout, round_trips},
};
use ringroad_vsock::{Addr, Listener, SocketType, Stream};
use std::{
    io::{self, Read, Write},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Result of one run.
#[derive(Clone, Copy)]
pub(super) struct Figure {
    /// Microseconds or Gb/s.
    pub(super) value: f64,
    /// The negotiated layout.
    pub(super) ring: Ring,
}

impl Args {
    /// Runs `work`, which measures, with our driver on a device, on the driver's CPU while the device is awake.
    fn with(
        &self,
        vsock: &Vsock,
        receive: usize,
        work: impl FnOnce(&VsockClient) -> Result<f64, String> + Send,
    ) -> Result<Figure, String> {
        let device = &vsock.device;
        device.awake(|| {
            let client = self.connect(vsock, 0, receive, self.common.driver_cpu)?;
            let value =
                self.common.on_driver_cpu(|| work(&client)).map_err(|error| format!("{}: {error}", device.name))?;
            Ok(Figure { value, ring: layout(client.acked()) })
        })
    }

    /// Measures round trips to the host's echo server: their mean in microseconds.
    pub(super) fn round_trip(&self, vsock: &Vsock, to: Addr, size: u64) -> Result<Figure, String> {
        self.with(vsock, RECEIVE, |client| {
            let stream = Stream::connect(client.stack(), to).map_err(message)?;
            let times = |seconds| round_trips(&stream, size as usize, Duration::from_secs_f64(seconds));
            times(0.1).and_then(|_| times(self.common.seconds)).map(|times| times.mean() / 1e3).map_err(message)
        })
    }

    /// Returns the rate in Gb/s by which `count` grows while `step` is repeated.
    pub(super) fn rate(&self, count: &AtomicU64, mut step: impl FnMut() -> io::Result<()>) -> Result<f64, String> {
        let mut repeat = |time: Duration| -> Result<f64, String> {
            let (before, start) = (count.load(Ordering::Relaxed), Instant::now());
            while start.elapsed() < time {
                step().map_err(message)?;
            }
            Ok(gbps(count.load(Ordering::Relaxed) - before, start.elapsed()))
        };
        repeat(Duration::from_millis(200))?;
        match repeat(Duration::from_secs_f64(self.common.seconds))? {
            0.0 => Err("no data arrived".into()),
            rate => Ok(rate),
        }
    }

    /// Measures a stream from the guest to `to`, which grows `count`.
    fn send(&self, client: &VsockClient, to: Addr, count: &Count) -> Result<f64, String> {
        let bytes = vec![0x5a; self.write as usize];
        let mut stream = Stream::connect(client.stack(), to).map_err(message)?;
        stream.set_timeout(Some(PATIENCE));
        self.rate(count, || stream.write_all(&bytes))
    }

    /// Measures a stream to the host.
    pub(super) fn to_host(&self, vsock: &Vsock, to: Addr) -> Result<Figure, String> {
        self.with(vsock, RECEIVE, |client| self.send(client, to, &vsock.count))
    }

    /// Measures a stream from the host.
    pub(super) fn to_guest(&self, vsock: &Vsock) -> Result<Figure, String> {
        let (host, size) = (&vsock.host, self.write as usize);
        self.with(vsock, RECEIVE, |client| {
            let listener = Listener::bind(client.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let (host, cpu) = (host.clone(), self.common.device_cpu);
            let program = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let (mut stream, bytes) = (connect(&host)?, vec![0x5a; size]);
                // Until the guest closes the connection.
                while stream.write_all(&bytes).is_ok() {}
                io::Result::Ok(())
            });
            let mut stream = listener.accept_within(Some(PATIENCE)).map_err(message)?;
            stream.set_timeout(Some(PATIENCE));
            let (count, mut buffer) = (Count::default(), vec![0; size.max(64 << 10)]);
            let rate = self.rate(&count, || {
                count.fetch_add(stream.read(&mut buffer)? as u64, Ordering::Relaxed);
                Ok(())
            });
            drop(stream);
            let _ = program.join();
            rate
        })
    }

    /// Measures a stream from one guest of a device to the other: to the guest itself, or to our device's relay.
    pub(super) fn to_sibling(&self, vsock: &Vsock, to: Addr) -> Result<Figure, String> {
        let receive = if vsock.is_peer { PEER_RECEIVE } else { RECEIVE };
        self.with(vsock, receive, |client| {
            // The other guest is on the CPU of the host.
            let cpu = self.common.device_cpu;
            let other = self.connect(vsock, 1, receive, cpu)?;
            let listener = Listener::bind(other.stack(), GUEST, SocketType::Stream).map_err(message)?;
            let count = Count::default();
            let received = count.clone();
            let reader = thread::spawn(move || {
                pin("--device-cpu", cpu).map_err(io::Error::other)?;
                let stream = listener.accept_within(Some(PATIENCE))?;
                // A device that loses the connection may not reset it at the other end.
                stream.set_timeout(Some(PATIENCE));
                each_read(&stream, 64 << 10, |bytes| add(&received, bytes))
            });
            let rate = self.send(client, to, &count);
            let _ = reader.join();
            rate
        })
    }
}
