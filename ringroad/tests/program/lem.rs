//! blast as the driver of an emulated card.

use crate::testing::{Folder, Program, run, text};
use serde_json::Value;
use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

/// Starts ringroad with a card for each of these names and further lines; returns their sockets.
fn serve<const N: usize>(folder: &Folder, cards: [(&str, &str); N]) -> (Program, [PathBuf; N]) {
    let mut config = String::new();
    for (name, more) in cards {
        let socket = folder.file(&format!("{name}.sock"));
        let socket = socket.display();
        write!(config, "[[port]]\nname = {name:?}\nkind = \"e1000\"\nsocket = \"{socket}\"\n{more}\n").unwrap();
    }
    let serve = Program::serve(&folder.write(&config), &[]);
    serve.logs("ready");
    (serve, cards.map(|(name, _)| folder.file(&format!("{name}.sock"))))
}

/// Runs blast briefly, with all bytes checked; returns its result.
#[track_caller]
fn blast(socket: &Path, arguments: &[&str]) -> Value {
    let all = ["blast", text(socket), "--driver", "lem", "--verify", "--seconds", "0.3", "--json", "-"];
    let (code, out, err) = run(&[&all[..], arguments].concat());
    assert_eq!(code, 0, "{arguments:?}: {out}{err}");
    serde_json::from_str(&out[out.find("\n{").unwrap() + 1..]).unwrap_or_else(|error| panic!("{error} in {out}"))
}

fn number(result: &Value, key: &str) -> f64 {
    result[key].as_f64().unwrap_or_else(|| panic!("no {key} in {result}"))
}

#[test]
fn a_card_reflects_every_frame() {
    let folder = Folder::new("lem-reflects");
    let (mut serve, [card]) = serve(&folder, [("a", "mode = \"reflect\"\nmtu = 9000")]);
    for arguments in [
        &["--accesses", "posted"][..],
        &["--accesses", "synchronous"],
        &["--mit", "--accesses", "synchronous"],
        &["--mit", "--itr", "0", "--size", "imix"],
        &["--queue-size", "64", "--size", "60,2048"],
    ] {
        // At this rate no frame is dropped for want of a receive buffer.
        let result = blast(&card, &[arguments, &["--rate", "2k"]].concat());
        let [sent, received, errors] = ["sent", "received", "errors"].map(|key| number(&result, key));
        assert!(sent > 0.0 && (received, errors) == (sent, 0.0), "{arguments:?}: {result}");
        assert_eq!(number(&result, "not_returned"), 0.0);
        assert!(number(&result, "interrupts") > 0.0 && number(&result, "reads") >= number(&result, "interrupts"));
    }
    serve.stop("TERM");
}

#[test]
fn a_deferring_driver_writes_few_registers() {
    let folder = Folder::new("lem-defers");
    let (mut serve, [standard, mitigated]) = serve(&folder, [("a", "mitigation = false"), ("b", "")]);
    for accesses in ["posted", "synchronous"] {
        let arguments = ["--accesses", accesses];
        for card in [&standard, &mitigated] {
            let result = blast(card, &arguments);
            // One for each frame; the handler of an interrupt masks it, if it was the card's, and unmasks.
            let [sent, posted, written, interrupts] =
                ["sent", "posted_writes", "writes", "interrupts"].map(|key| number(&result, key));
            let others = posted + written - sent;
            assert!(interrupts <= others && others <= 2.0 * interrupts, "{result}");
            assert_eq!(result["transmitted"], result["sent"]);
        }
        let result = blast(&mitigated, &[&["--mit"][..], &arguments].concat());
        assert!(number(&result, "writes_per_frame") < 0.5, "{result}");
        assert_eq!(result["transmitted"], result["sent"]);
    }
    serve.stop("TERM");
}

/// Frames come faster than interrupts may. How much fewer there are is a question of who else needs the processor.
#[test]
fn interrupts_keep_the_interval_that_the_driver_has_set() {
    let folder = Folder::new("lem-interval");
    let (mut serve, [card]) = serve(&folder, [("a", "mode = \"reflect\"")]);
    for itr in [488, 2000, 20_000] {
        let result = blast(&card, &["--itr", &itr.to_string(), "--rate", "40k"]);
        let (interrupts, seconds) = (number(&result, "interrupts"), number(&result, "seconds"));
        let most = seconds / (f64::from(itr) * 256e-9) + 2.0;
        assert!(0.0 < interrupts && interrupts < most, "{itr}: {interrupts} in {seconds} s, expected up to {most}");
    }
    serve.stop("TERM");
}

#[test]
fn what_this_driver_does_not_have() {
    let folder = Folder::new("lem-options");
    let socket = folder.file("a.sock");
    for (arguments, log) in [
        (&["--driver", "lem", "--window", "4"][..], "knows no --window"),
        (&["--driver", "lem", "--mode", "reflect"], "knows no --mode reflect"),
        (&["--driver", "lem", "--without", "in_order"], "knows no --without"),
        (
            &["--driver", "lem", "--queue-size", "12"],
            "--queue-size 12: expected 8 to 4096 descriptors, a multiple of 8",
        ),
        (&["--driver", "lem", "--size", "4096"], "--size 4096: this driver's frames have up to 2048 bytes"),
        (&["--driver", "lem"], "cannot connect to"),
        (&["--mit"], "--mit is for --driver lem"),
        (&["--driver", "plain", "--itr", "5"], "--itr is for --driver lem"),
    ] {
        let (code, _, err) = run(&[&["blast", text(&socket)], arguments].concat());
        assert!(code != 0 && err.contains(log), "{arguments:?}: {code}, {err}");
    }
    // Another kind of port.
    let config = folder.config(&[("a", "")]);
    let mut serve = Program::serve(&config, &[]);
    serve.logs("ready");
    let (code, _, err) = run(&["blast", text(&socket), "--driver", "lem"]);
    assert!(code == 1 && err.contains("the connection to the device is over"), "{err}");
    serve.stop("TERM");
}
