//! Programs at the ends of vsock connections: echo servers and measurements. Used by `ringroad vsock` and the vsock benches.

use crate::{options::Ring, totals::gbps};
use hdrhistogram::Histogram;
use ringroad_host::vsock::VsockConnector;
use ringroad_vsock::{DriverSide, Features, Settings, Stream};
use std::{
    io::{self, Read, Write},
    net::Shutdown,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Payload bytes of each of the driver's receive buffers.
pub const RECEIVE: usize = 16 << 10;

/// Returns how to connect our vsock driver to a device.
pub fn connector(socket: &Path, ring: Ring, settings: Settings) -> VsockConnector {
    VsockConnector {
        socket: socket.to_owned(),
        listen: false,
        patience: Duration::from_secs(5),
        features: Features::layout(ring == Ring::Packed).bits(),
        queue_size: 128,
        receive: RECEIVE,
        cid: None,
        settings,
        reconnect: None,
    }
}

/// Returns the layout of rings for which these feature bits were negotiated.
pub fn layout(acked: u64) -> Ring {
    if Features::from_bits_truncate(acked).contains(Features::PACKED) { Ring::Packed } else { Ring::Split }
}

/// Reads a stream to its end, up to `size` bytes at a time, and calls `each` with the bytes of each read.
///
/// # Errors
/// Reading has failed, or `each` has.
pub fn each_read(from: impl Read, size: usize, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let (mut from, mut buffer) = (from, vec![0; size]);
    while let count @ 1.. = from.read(&mut buffer)? {
        each(buffer.get(..count).unwrap_or_default())?;
    }
    Ok(())
}

/// Measures round trips of `size` bytes for `duration`, in nanoseconds.
///
/// # Errors
/// The connection has failed.
pub fn round_trips<S: Read + Write>(stream: S, size: usize, duration: Duration) -> io::Result<Histogram<u64>> {
    let mut stream = stream;
    let mut times = Histogram::new(3).map_err(io::Error::other)?;
    let (out, mut back) = (vec![0xa5; size], vec![0; size]);
    let start = Instant::now();
    let mut sent = start;
    while sent.duration_since(start) < duration {
        stream.write_all(&out)?;
        stream.read_exact(&mut back)?;
        let now = Instant::now();
        times.record(now.duration_since(sent).as_nanos() as u64).map_err(io::Error::other)?;
        sent = now;
    }
    Ok(times)
}

/// Sends to an echo server for `duration`, `write` bytes at a time, and receives what it returns. Returns the rate in Gb/s.
///
/// # Errors
/// The connection has failed.
pub fn throughput(stream: Stream<DriverSide>, write: usize, duration: Duration) -> io::Result<f64> {
    let (there, back) = (stream.clone(), stream);
    let start = Instant::now();
    let sender = thread::spawn(move || {
        let bytes = vec![0x5a; write];
        while start.elapsed() < duration {
            (&there).write_all(&bytes)?;
        }
        there.shutdown(Shutdown::Write);
        io::Result::Ok(())
    });
    let mut total = 0;
    each_read(&back, 256 << 10, |bytes| {
        total += bytes.len() as u64;
        Ok(())
    })?;
    sender.join().map_err(|_| io::Error::other("the sender thread panicked"))??;
    Ok(gbps(total, start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_what_was_negotiated() {
        let offered = Features::all().bits();
        for ring in [Ring::Packed, Ring::Split] {
            assert_eq!(layout(offered & connector(Path::new("a.sock"), ring, Settings::default()).features), ring);
        }
        assert_eq!((layout(1 << 34), layout(!(1 << 34)), layout(0)), (Ring::Packed, Ring::Split, Ring::Split));
    }
}
