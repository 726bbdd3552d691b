use super::{
    devices::{Count, add, vm},
    *,
};
use crate::{
    rig::Device,
    testing::{help, parse},
};
use ringroad_traffic::options::Ring;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

fn args(words: &str) -> Args {
    parse(words)
}

fn pollings(words: &str) -> Result<Vec<[String; 2]>, String> {
    Ok(args(words).pollings()?.into_iter().map(|Polling { poll, device_poll }| [poll, device_poll]).collect())
}

#[test]
fn polling_is_a_list_of_pairs() {
    let both = [["0", "0"], ["50us", "50us"]];
    assert_eq!(pollings("").unwrap(), both);
    assert_eq!(pollings("--poll 0 --device-poll 0").unwrap(), [["0", "0"]]);
    assert_eq!(pollings("--poll 0").unwrap(), [["0", "0"]]);
    assert_eq!(pollings("--device-poll 50us").unwrap(), [["50us", "50us"]]);
    assert_eq!(pollings("--poll 0,50us --device-poll 0,50us").unwrap(), both);
    assert_eq!(pollings("--poll 0,unlimited --device-poll 0").unwrap(), [["0", "0"], ["unlimited", "0"]]);
    assert_eq!(pollings("--poll 1ms --device-poll 0,50us").unwrap(), [["1ms", "0"], ["1ms", "50us"]]);
    let error = pollings("--poll 0,50us --device-poll 0,50us,1ms").unwrap_err();
    assert!(error.contains("found 2 and 3 values"), "{error}");
    for wrong in ["--poll 5", "--poll 0 --device-poll never"] {
        assert!(pollings(wrong).unwrap_err().contains("expected 0, a number of us"), "{wrong}");
    }
    assert_eq!(
        args("").pollings().unwrap().iter().map(Polling::to_string).collect::<Vec<_>>(),
        ["event driven", "poll 50us, device poll 50us"]
    );
}

#[test]
fn the_help_has_examples() {
    let help = help::<Args>();
    assert!(help.contains("ringroad bench vsock-peer --poll 0 "), "{help}");
}

/// Runs `test` with a group of event-driven cases.
fn group(test: impl FnOnce(&mut Group<'_, '_>)) {
    let args = args("--pairs 1");
    let polling = args.pollings().unwrap().remove(0);
    let mut session = Session::new("vsock-peer", &args.common, 2, false);
    test(&mut Group { args: &args, polling: &polling, session: &mut session, lines: Vec::new() });
}

#[test]
fn rows_have_what_was_negotiated() {
    let figure = |value, ring| vec![Figure { value, ring }];
    group(|group| {
        let case = Case { name: "round trip 64 B".into(), unit: "us", fields: json!({ "size": 64 }) };
        let differ = Rounds::new(vec![figure(2.0, Ring::Packed), figure(6.0, Ring::Split)]);
        let (row, columns) = group.results(&case, "other", &differ);
        for (key, value) in [("ring", "packed"), ("peer_ring", "split"), ("poll", "0"), ("device_poll", "0")] {
            assert_eq!(row[key], value, "{key}");
        }
        assert_eq!((&row["ratio"], &row["peer_name"]), (&json!(3.0), &json!("other")));
        assert_eq!(columns[7..], ["packed / split", "other"]);
        let same = Rounds::new(vec![figure(2.0, Ring::Split), figure(6.0, Ring::Split)]);
        assert_eq!(
            group.results(&args("").stream("to-host"), "other", &same).1[5..],
            ["0.33", "0.33–0.33", "split", "other"]
        );
        let (row, columns) = group.results(&case, "", &Rounds::new(vec![figure(2.0, Ring::Packed)]));
        assert_eq!((&row["ring"], row.get("peer_ring"), columns.len()), (&json!("packed"), None, 3));
    });
}

/// Returns a device without a program.
fn vsock(is_peer: bool) -> Vsock {
    let device = Device { name: String::new(), sockets: Vec::new(), programs: Vec::new() };
    Vsock { device, host: PathBuf::new(), is_peer, poll: Duration::ZERO, count: Count::default() }
}

#[test]
fn a_case_is_skipped_if_the_peer_fails() {
    let (ours, peer, to) = (vsock(false), vsock(true), Addr { cid: SIBLING, port: GUEST });
    let ways = [(&ours, to), (&peer, to)];
    let only = |is_peer: bool| {
        move |way: &Way<'_>| match way.0.is_peer == is_peer {
            true => Err("the connection was reset".to_owned()),
            false => Ok(Figure { value: 1.0, ring: Ring::Packed }),
        }
    };
    group(|group| {
        let case = args("").stream("to-sibling");
        group.compare(&case, &ways, "other", only(true)).unwrap();
        assert!(group.lines.is_empty());
        // What fails on our device is an error.
        assert_eq!(group.compare(&case, &ways, "other", only(false)).unwrap_err(), "the connection was reset");
        group.compare(&case, &ways[..1], "", only(true)).unwrap();
        let rows = group.session.rows();
        assert_eq!((rows.len(), group.lines.len()), (2, 1));
        let skipped = json!({
            "unit": "Gb/s", "poll": "0", "device_poll": "0", "direction": "to-sibling", "size": 65536, "peer_name": "other",
            "skipped": "the connection was reset",
        });
        assert_eq!((&rows[0], &rows[1]["ours"]), (&skipped, &json!(1.0)));
    });
}

#[test]
fn guests_of_the_peer_are_siblings() {
    let option = vm(SIBLING, Path::new("/tmp/a.sock"), Path::new("/tmp/a.host"));
    assert_eq!(option, "guest-cid=4,socket=/tmp/a.sock,uds-path=/tmp/a.host,groups=g");
}

#[test]
fn a_stream_that_moves_nothing_is_an_error() {
    let (args, count) = (args("--seconds 0.01"), Count::default());
    assert_eq!(args.rate(&count, || Ok(())), Err("no data arrived".to_owned()));
    assert!(args.rate(&count, || add(&count, b"data")).unwrap() > 0.0);
}
