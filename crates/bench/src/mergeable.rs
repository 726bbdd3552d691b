//! Receive buffers of our driver (seed 004): the kernel's TCP from one network namespace to another, TAP, switch, device, rings, driver,
//! TAP. The three policies of `ringroad attach` take turns.

use crate::{
    figures::{RATIO, Spread, extend},
    lab::{add_network, command, enter, iperf3_report, iperf3_server, serve},
    options::Common,
    peer::in_chroot,
    rig::on,
    session::Session,
};
use clap::ValueEnum;
use ringroad_text::table;
use ringroad_traffic::child::{Folder, Program, ourselves};
use serde_json::{Value, json};
use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    ringroad bench mergeable --json mergeable.json        needs root and iperf3 (scripts/peers forky)\n  \
    ringroad bench mergeable --load large --pairs 9\n  \
    ringroad bench mergeable --plot buffers.svg           also plots the size of buffers over time")]
pub struct Args {
    /// What is sent to the driver, as a list
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["large", "frames", "mixed"])]
    load: Vec<Load>,
    /// Also plot the size of the buffers while the load changes, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Load {
    /// TCP in frames of up to 64 KiB
    Large,
    /// TCP in frames of the MTU
    Frames,
    /// TCP in frames of up to 64 KiB, beside UDP in frames of 64 bytes
    Mixed,
}

/// Policies, by their names for `ringroad attach`.
const POLICIES: [&str; 3] = ["auto", "page", "mtu"];

/// The two networks, ours and the driver's.
struct Bed<'a> {
    common: &'a Common,
    folder: &'a Folder,
    socket: PathBuf,
    namespace: Namespace,
    _daemon: Program,
}

/// A network namespace. Dropped, it is deleted.
struct Namespace(String);

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = command("ip", &["netns", "del", &self.0]);
    }
}

/// The network of both ends, their addresses, and the first TCP port.
const NETWORK: &str = "10.93.0";
const OURS: &str = "10.93.0.1";
const DRIVER: &str = "10.93.0.2";
const PORT: u16 = 5301;

/// What one run showed.
#[derive(Clone, Copy)]
struct Run {
    /// Throughput in Gb/s.
    rate: f64,
    /// Bytes of buffers for each byte received.
    truesize: f64,
    /// Buffers for each frame.
    buffers: f64,
}

impl<'a> Bed<'a> {
    fn new(common: &'a Common, folder: &'a Folder) -> Result<Bed<'a>, String> {
        let socket = folder.file("device.sock");
        let config = format!(
            "[workers]\ncpus = [{}]\n\
             [[port]]\nname = \"device\"\nkind = \"vhost-user\"\nsocket = \"{}\"\n\
             [[port]]\nname = \"host\"\nkind = \"tap\"\ninterface = \"rr0\"\n",
            common.device_cpu,
            socket.display()
        );
        let daemon = serve(folder, "mergeable", &config, std::slice::from_ref(&socket))?;
        add_network("rr0", NETWORK, "cubic")?;
        let namespace = Namespace(format!("rr-bench-{}", std::process::id()));
        command("ip", &["netns", "add", &namespace.0])?;
        Ok(Bed { common, folder, socket, namespace, _daemon: daemon })
    }

    /// Starts the driver, with these options, in its namespace; its figures go to a file.
    fn attach(&self, policy: &str, options: &[&str], out: Stdio) -> Result<(Program, PathBuf), String> {
        let (figures, log) = (self.folder.file("figures.json"), self.folder.file("attach.log"));
        let ours = ourselves()?;
        let mut attach = Command::new("ip");
        attach.args(["netns", "exec", &self.namespace.0]).arg(ours.get_program());
        attach.arg("attach").arg(&self.socket).args(["--tap", "rr1", "--buffers", policy]).args(options);
        attach.args(["--cpu", &self.common.driver_cpu.to_string()]).arg("--json").arg(&figures).stdout(out);
        let program = Program::start("ringroad attach", &mut attach, &log)?;
        let namespace = self.namespace.0.as_str();
        let (start, address) = (Instant::now(), format!("{DRIVER}/24"));
        while command("ip", &["-n", namespace, "addr", "add", &address, "dev", "rr1"]).is_err() {
            if start.elapsed() > Duration::from_secs(5) {
                let said = fs::read_to_string(&log).unwrap_or_default();
                return Err(format!("`ringroad attach` has no interface after 5 s: {said}"));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok((program, figures))
    }

    /// Runs iperf3 in the driver's namespace with these options for a time; returns its report.
    fn iperf3(&self, port: u16, options: &[&str], seconds: f64) -> Result<Value, String> {
        let _server = iperf3_server(self.common.device_cpu, port)?;
        let words = in_chroot("iperf3").map_err(|missing| format!("no {missing} (scripts/peers forky sets it up)"))?;
        let (port, time) = (port.to_string(), format!("{}", seconds.max(1.0).ceil()));
        let mut all = vec!["netns", "exec", self.namespace.0.as_str()];
        all.extend(words.iter().map(String::as_str));
        all.extend(["-c", OURS, "-p", &port, "-R", "-t", &time, "-J"]);
        all.extend(options);
        on("--driver-cpu", self.common.driver_cpu, || iperf3_report(&command("ip", &all)?))
    }

    /// Measures a load with one policy.
    fn measure(&self, load: Load, policy: &str) -> Result<Run, String> {
        let options: &[&str] = if load == Load::Frames { &["--no-long-frames"] } else { &[] };
        let (mut driver, figures) = self.attach(policy, options, Stdio::null())?;
        let seconds = self.common.seconds;
        let report = if load == Load::Mixed {
            thread::scope(|scope| {
                let small = scope.spawn(|| self.iperf3(PORT + 1, &["-u", "-b", "20M", "-l", "22"], seconds));
                let report = self.iperf3(PORT, &[], seconds);
                let small = small.join().map_err(|_| "a measuring thread panicked".to_owned())?;
                small.and(report)
            })
        } else {
            self.iperf3(PORT, &[], seconds)
        }?;
        driver.end();
        drop(driver);
        let rate = number(&report, "/end/sum_received/bits_per_second")? / 1e9;
        let held = read(&figures)?;
        let [frames, buffers] = ["frames", "buffers"].map(|key| number(&held, &format!("/received/{key}")));
        Ok(Run { rate, truesize: number(&held, "/truesize_per_byte")?, buffers: buffers? / frames?.max(1.0) })
    }

    /// Records the size of buffers while the load changes: large frames, short ones, large ones, those of the MTU. Returns times in
    /// seconds and sizes in bytes.
    fn trace(&self, policy: &str) -> Result<Vec<(f64, f64)>, String> {
        const EVERY: f64 = 0.02;
        let file = self.folder.file("trace.jsonl");
        let out = fs::File::create(&file).map_err(|error| format!("cannot create {}: {error}", file.display()))?;
        let (mut driver, _) = self.attach(policy, &["--every", &EVERY.to_string()], out.into())?;
        let short: &[&str] = &["-u", "-b", "30M", "-l", "22"];
        for options in [&[][..], short, &[], &["-u", "-b", "2G", "-l", "1400"]] {
            self.iperf3(PORT, options, 1.0)?;
        }
        driver.end();
        let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        let point = |line: &str| {
            let figures = serde_json::from_str::<Value>(line).ok()?;
            Some((figures.get("seconds")?.as_f64()?, figures.get("buffer")?.as_f64()?))
        };
        Ok(text.lines().filter_map(point).collect())
    }
}

fn read(file: &Path) -> Result<Value, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
}

fn number(value: &Value, path: &str) -> Result<f64, String> {
    value.pointer(path).and_then(Value::as_f64).ok_or_else(|| format!("no {path} in {value}"))
}

/// Measures every load with every policy.
pub fn run(args: &Args) -> Result<(), String> {
    if let Some(status) = enter()? {
        return if status.success() { Ok(()) } else { Err(format!("the bench in its network namespace: {status}")) };
    }
    let folder = Folder::new("mergeable")?;
    let Common { pairs, seconds, .. } = args.common;
    let bed = Bed::new(&args.common, &folder)?;
    let mut session = Session::new("mergeable", &args.common, args.load.len(), false);
    let (mut lines, mut names) = (Vec::new(), Vec::new());
    for &load in &args.load {
        let way = match load {
            Load::Large => "TCP, frames of up to 64 KiB",
            Load::Frames => "TCP, frames of the MTU",
            Load::Mixed => "TCP, up to 64 KiB, beside UDP of 64 B",
        };
        let rounds = session.rounds(way, &POLICIES, |policy| bed.measure(load, policy))?;
        for (index, policy) in POLICIES.iter().enumerate() {
            let of = |figure: fn(&Run) -> f64| rounds.spread(index, figure);
            let ratio = |figure: fn(&Run) -> f64| Spread::of_ratios(&rounds.of(0, figure), &rounds.of(index, figure));
            let (rate, auto) = (of(|run| run.rate), rounds.spread(0, |run| run.rate));
            let (truesize, held) = (of(|run| run.truesize), ratio(|run| run.truesize));
            let mut row = json!({
                "way": way, "policy": "auto", "peer_name": policy, "unit": "Gb/s", "pairs": pairs,
                "truesize_per_byte": truesize.median, "truesize_ratio": held.median,
                "buffers_per_frame": of(|run| run.buffers).median,
            });
            auto.add_to(&mut row, ["ours", "ours_min", "ours_max"]);
            rate.add_to(&mut row, ["peer", "peer_min", "peer_max"]);
            ratio(|run| run.rate).add_to(&mut row, RATIO);
            extend(&mut row, json!({ "seconds": seconds }));
            session.push(row)?;
            let mut columns = vec![way.to_owned(), (*policy).to_owned()];
            columns.extend([rate.columns(2), ratio(|run| run.rate).columns(3)].concat());
            columns.extend([truesize.columns(3), held.columns(3)].concat());
            columns.push(format!("{:.1}", of(|run| run.buffers).median));
            lines.push(columns);
        }
        names.push(way);
    }
    let title = format!(
        "{} to our driver, {pairs} rounds of {seconds} s, median and min–max; auto/: auto's figure by this policy's",
        names.join("; ")
    );
    let header = ["", "buffers", "Gb/s", "", "auto/", "", "held per byte", "", "auto/", "", "buffers per frame"];
    session.print(&title, &table(&header, &lines));
    if let Some(file) = &args.plot {
        let traces =
            POLICIES.iter().map(|policy| Ok((*policy, bed.trace(policy)?))).collect::<Result<Vec<_>, String>>()?;
        fs::write(file, plot(&traces)).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    }
    session.finish()
}

/// Draws the size of buffers over time.
fn plot(traces: &[(&str, Vec<(f64, f64)>)]) -> String {
    const SIZE: (f64, f64) = (800.0, 300.0);
    const MARGIN: f64 = 50.0;
    let most = |of: fn(&(f64, f64)) -> f64| traces.iter().flat_map(|(_, points)| points).map(of).fold(1.0, f64::max);
    let (longest, largest) = (most(|point| point.0), most(|point| point.1) * 1.1);
    let x = |seconds: f64| MARGIN + seconds / longest * (SIZE.0 - 2.0 * MARGIN);
    let y = |bytes: f64| SIZE.1 - MARGIN - bytes / largest * (SIZE.1 - 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        SIZE.0, SIZE.1
    );
    let mut text = |x: f64, y: f64, color: &str, text: &str| {
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{color}\">{text}</text>");
    };
    text(MARGIN, 20.0, "black", "receive buffer in bytes, by seconds: frames of 64 KiB, of 64 B, of 64 KiB, of 1442 B");
    for bytes in [0.0, 1536.0, 4096.0] {
        text(8.0, y(bytes) + 4.0, "black", &format!("{bytes}"));
    }
    for second in 0..=longest as u32 {
        text(x(second.into()) - 3.0, SIZE.1 - MARGIN + 18.0, "black", &format!("{second}"));
    }
    let colors = ["crimson", "steelblue", "seagreen"];
    for (((name, points), color), at) in traces.iter().zip(colors).zip(1..) {
        text(SIZE.0 - MARGIN + 4.0, MARGIN + 16.0 * f64::from(at), color, name);
        let _ = points;
    }
    for ((_, points), color) in traces.iter().zip(colors) {
        let line: Vec<String> = points.iter().map(|&(at, size)| format!("{:.1},{:.1}", x(at), y(size))).collect();
        let _ = writeln!(svg, "<polyline fill=\"none\" stroke=\"{color}\" points=\"{}\"/>", line.join(" "));
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_a_line_for_each_policy() {
        let svg = plot(&[("auto", vec![(0.0, 1536.0), (1.0, 4096.0)]), ("mtu", vec![(0.0, 1536.0)])]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains(">auto</text>"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert!(!plot(&[]).contains("NaN"));
    }

    #[test]
    fn figures_that_are_missing_are_named() {
        assert_eq!(number(&json!({ "a": { "b": 2 } }), "/a/b"), Ok(2.0));
        assert!(number(&json!({}), "/a/b").unwrap_err().contains("/a/b"));
    }
}
