//! A port of one's own: it prints the addresses of each frame that it gets, beside a guest on the same switch.
//!     cargo run --example own_port -- /tmp/vm1.sock

use ringroad::{
    Port, PortKind, PortSettings, Worker, WorkerConfig,
    frame::{Burst, Counters, Sink, Source},
    ports,
    vhost_user::{Server, VhostConfig, VhostPort},
    wire::ethernet::Addresses,
};
use std::{error::Error, sync::Arc, thread};

/// A port that frames go to and none come from.
struct Printer([Arc<Counters>; 1]);

struct Nothing;

impl Source for Nothing {
    fn take(&mut self, _: &mut Burst) -> usize {
        0
    }
    fn done(&mut self, _: &mut Burst) {}
}

impl Sink for &Printer {
    fn put(&mut self, burst: &Burst, which: &[u8]) -> usize {
        for frame in which.iter().filter_map(|&index| burst.frames().get(usize::from(index))) {
            let Addresses { source, destination } = Addresses::from_words(frame.addresses());
            println!("{source} -> {destination}, {} bytes", frame.len());
        }
        self.0[0].frames.add(which.len() as u64);
        which.len()
    }
}

#[rustfmt::skip]
impl PortKind for Printer {
    type Lease = ();
    type Source<'a> = Nothing;
    type Sink<'a> = &'a Printer;
    fn name(&self) -> &str { "printer" }
    fn received(&self) -> &[Arc<Counters>] { &[] }
    fn sent(&self) -> &[Arc<Counters>] { &self.0 }
    fn lease(&self, _: usize) -> Option<()> { None }
    fn source<'a>(&'a self, _: usize, _: &'a mut ()) -> Option<Nothing> { None }
    fn sink(&self, _: usize, _: usize) -> Option<&Printer> { Some(self) }
}

ports! { enum Ports { Guest(VhostPort), Own(Printer) } }

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args().nth(1).ok_or("expected a socket, such as: /tmp/vm1.sock")?;
    let worker = Worker::start(WorkerConfig::default())?;
    let _guest = Server::start(VhostConfig::new("vm1", socket), &worker, Ports::Guest)?;
    let _printer = worker.add(Port::new(Ports::Own(Printer(Default::default())), PortSettings::default()))?;
    println!("ready");
    loop {
        thread::park();
    }
}
