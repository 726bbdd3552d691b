//! `ringroad demo`: a switch (`serve`) and two drivers (`blast`) over vhost-user sockets, each in its own process.

use crate::outcome::Outcome;
use ringroad_text::{count, time};
use ringroad_traffic::{
    child::{Folder, Program, ourselves, port},
    options::Ring,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{ExitCode, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};

/// Run a switch with two built-in drivers for a few seconds and show rates, round trips and drops
#[derive(clap::Args)]
#[command(after_help = "Example:\n  ringroad demo --seconds 10 --ring split\n\n\
    Starts `ringroad serve` with two ports and a `ringroad blast` driver on each: one sends frames of mixed sizes, the other\n\
    reflects them, and every byte is verified. Needs no root, no guests and no hugepages.")]
pub struct Args {
    /// Duration in seconds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Ring layout
    #[arg(long, value_enum, default_value = "packed")]
    ring: Ring,
    /// Frame sizes, as for `ringroad blast --size`: 64,1518 or imix
    #[arg(long, default_value = "imix")]
    size: String,
    /// Maximum number of frames in flight
    #[arg(long, default_value_t = 128)]
    window: u64,
}

/// Runs the demo.
pub fn run(args: Args) -> Outcome {
    let folder = Folder::new("demo")?;
    let (here, there) = (folder.file("here.sock"), folder.file("there.sock"));
    let counters = folder.file("counters.json");
    println!("switch   ringroad serve, ports `here` and `there`");
    let config = port("here", &here, "") + &port("there", &there, "");
    let arguments = ["--json".as_ref(), counters.as_os_str()];
    let mut serve = Program::serve(&folder, "serve", &config, &arguments, [&here, &there])?;

    let blast = |socket: &Path, arguments: &[&str]| -> Result<Program, String> {
        let mut command = ourselves()?;
        command
            .arg("blast")
            .arg(socket)
            .args(["--lines", "--event-driven", "--ring", &args.ring.to_string()])
            .args(arguments);
        command.stdout(Stdio::piped());
        Program::start("a driver", &mut command, &socket.with_extension("log"))
    };
    println!("driver   ringroad blast there.sock --mode reflect");
    // The reflector outlives the sender, whose end ends the demo.
    let longer = (args.seconds + 60).to_string();
    let mut reflector = blast(&there, &["--mode", "reflect", "--seconds", &longer])?;
    let reflected = follow(&mut reflector);
    println!("driver   ringroad blast here.sock --mode tx --verify --size {} --window {}\n", args.size, args.window);
    let (window, seconds) = (args.window.to_string(), args.seconds.to_string());
    let sender_arguments =
        ["--mode", "tx", "--verify", "--size", &args.size, "--window", &window, "--seconds", &seconds];
    let mut sender = blast(&here, &sender_arguments)?;
    let start = Instant::now();
    let result = show(&mut sender, &serve, &reflected)?;
    let elapsed = start.elapsed().as_secs_f64();
    let busy = |program: &Program| program.cpu_time().as_secs_f64() / elapsed * 100.0;
    let (switch_busy, reflector_busy) = (busy(&serve), busy(&reflector));
    drop(sender);
    drop(reflector);
    serve.end();
    if result.is_null() {
        let log = fs::read_to_string(here.with_extension("log")).unwrap_or_default();
        return Err(format!("the sender exited without a result:\n{log}").into());
    }
    let counters: Value = serde_json::from_str(&fs::read_to_string(&counters)?)?;
    Ok(summary(&result, &counters, switch_busy, reflector_busy))
}

/// Prints what the sender reports each second, until it reports its result. Returns that; null if the sender exits without one.
fn show(sender: &mut Program, serve: &Program, reflected: &Mutex<Value>) -> Result<Value, Box<dyn std::error::Error>> {
    let mut switch_cpu = serve.cpu_time();
    let output = sender.child().stdout.take().ok_or("a driver has no output")?;
    for line in BufReader::new(output).lines() {
        let line: Value = serde_json::from_str(&line?)?;
        if line["blast"].is_string() {
            return Ok(line);
        }
        let cpu = serve.cpu_time();
        let other = lock(reflected)["cpu_percent"].as_f64().unwrap_or(0.0);
        println!(
            "{:>3} s   sent {:.3} Mpps   returned {:.3} Mpps   payload errors {}   CPU: switch {:.0} %, sender {:.0} %, reflector {:.0} %",
            line["second"],
            line["sent"].as_f64().unwrap_or(0.0) / 1e6,
            line["received"].as_f64().unwrap_or(0.0) / 1e6,
            line["errors"],
            (cpu - switch_cpu).as_secs_f64() * 100.0,
            line["cpu_percent"].as_f64().unwrap_or(0.0),
            other
        );
        switch_cpu = cpu;
    }
    Ok(Value::Null)
}

/// Follows a program's output; the result holds its last line.
fn follow(program: &mut Program) -> Arc<Mutex<Value>> {
    let last = Arc::new(Mutex::new(Value::Null));
    if let Some(output) = program.child().stdout.take() {
        let last = last.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                *lock(&last) = serde_json::from_str(&line).unwrap_or_default();
            }
        });
    }
    last
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn summary(result: &Value, counters: &Value, switch_busy: f64, reflector_busy: f64) -> ExitCode {
    let ports = counters["ports"].as_array().cloned().unwrap_or_default();
    let dropped: u64 =
        ports.iter().flat_map(|port| [&port["from"], &port["to"]]).filter_map(|side| side["dropped"].as_u64()).sum();
    let number = |key: &str| result[key].as_f64().unwrap_or(0.0);
    let trip = |key: &str| result["round_trip_ns"][key].as_u64().map_or("-".into(), time);
    let sender_busy = number("cpu_seconds") / number("seconds") * 100.0;
    let errors = result["errors"].as_u64().unwrap_or(u64::MAX);
    let received = result["received"].as_u64().unwrap_or(0);
    let rows = [
        ("frames returned", count(received)),
        (
            "switch throughput",
            format!("{:.3} Mpps, {:.2} Gb/s", 2.0 * number("received_mpps"), 2.0 * number("received_gbps")),
        ),
        ("round trip p50 / p99", format!("{} / {}", trip("p50"), trip("p99"))),
        ("dropped", count(dropped)),
        ("payload errors", count(errors)),
        ("CPU of the switch", format!("{switch_busy:.0} %")),
        ("CPU of the sender", format!("{sender_busy:.0} %")),
        ("CPU of the reflector", format!("{reflector_busy:.0} %")),
    ];
    println!();
    rows.iter().for_each(|(name, value)| println!("{name:<22}  {value}"));
    if errors == 0 && received > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
