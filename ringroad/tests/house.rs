//! Checks the layering of the crates (ARCHITECTURE.md): dependencies point downwards only, unsafe code is confined to two places,
//! and all other crates forbid it.

#[path = "house/imports.rs"]
mod imports;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The rooms, lower ones first. A room may import those of lower floors only.
const FLOORS: &[&[&str]] = &[
    &["mem", "wire", "text"],
    &["frame", "ring"],
    &["net", "e1000", "vsock", "switch"],
    &["host"],
    &["traffic"],
    &["bench"],
    &["ringroad"],
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn floor(room: &str) -> usize {
    FLOORS
        .iter()
        .position(|rooms| rooms.contains(&room))
        .unwrap_or_else(|| panic!("{room} is on no floor: add it here"))
}

/// Each room with its folder.
fn rooms() -> Vec<(String, PathBuf)> {
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let mut rooms: Vec<_> = crates
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path))
        .collect();
    rooms.push(("ringroad".into(), root().join("ringroad")));
    assert_eq!(rooms.len(), FLOORS.iter().map(|rooms| rooms.len()).sum::<usize>(), "every room is on one floor");
    rooms
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn is_lower(from: &str, to: &str) -> bool {
    floor(to) < floor(from)
}

#[test]
fn imports_run_one_way() {
    for (room, folder) in rooms() {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        // Tests may use what lies higher.
        let product = manifest.split("[dev-dependencies]").next().unwrap();
        for line in product.lines().filter_map(|line| line.strip_prefix("ringroad-")) {
            let to = line.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap();
            assert!(is_lower(&room, to), "{room}/Cargo.toml imports {to}, which is not below it");
        }
        let mut files = Vec::new();
        sources(&folder.join("src"), &mut files);
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let code: String = text.lines().map(|line| line.split("//").next().unwrap()).collect();
            for to in code.split("ringroad_").skip(1).filter_map(|rest| rest.split("::").next()) {
                if FLOORS.iter().any(|rooms| rooms.contains(&to)) {
                    assert!(is_lower(&room, to), "{} imports {to}, which is not below {room}", file.display());
                }
            }
        }
    }
}

#[test]
fn files_of_a_room_do_not_import_each_other_in_a_circle() {
    let mut files = 0;
    for (room, folder) in rooms() {
        let imports = imports::imports(&folder.join("src"));
        files += imports.values().filter(|targets| !targets.is_empty()).count();
        let circle =
            imports::circle(&imports).map(|circle| circle.iter().map(|module| module.join("/")).collect::<Vec<_>>());
        assert_eq!(circle, None, "{room}: files import each other in a circle");
    }
    assert!(files > 50, "the search finds what there is");
    let names = |names: &[&str]| names.iter().map(|name| vec![(*name).to_owned()]).collect::<BTreeSet<_>>();
    let graph = |edges: &[(&str, &[&str])]| {
        edges.iter().map(|&(from, to)| (vec![from.to_owned()], names(to))).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(imports::circle(&graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
    let circle = imports::circle(&graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])])).unwrap();
    assert_eq!(circle.into_iter().collect::<BTreeSet<_>>(), names(&["b", "c"]));
}

/// `serve`, its configuration and its log do not use what measures them; only the commands beside them do.
#[test]
fn the_product_does_not_measure() {
    let folder = root().join("ringroad/src");
    let mut files = vec![folder.join("serve.rs"), folder.join("logger.rs")];
    ["serve", "config"].iter().for_each(|part| sources(&folder.join(part), &mut files));
    assert!(files.len() > 5, "the search finds the files");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for other in ["ringroad_traffic", "ringroad_bench", "crate::blast", "crate::demo", "crate::vsock"] {
            assert!(!text.contains(other), "{} uses {other}", file.display());
        }
    }
}

/// Whether a line of code, comments and strings apart, has the word.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap();
    code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") && !code.contains('"')
}

#[test]
fn unsafe_code_stays_in_its_two_rooms() {
    // The last one is an attacker that the sandbox must stop.
    let allowed = ["mem/src", "mem/benches", "host/src/sys", "host/examples/confined.rs"]
        .map(|place| root().join("crates").join(place));
    let mut seen = 0;
    for (room, folder) in rooms() {
        let mut files = Vec::new();
        let parts = ["src", "tests", "benches", "examples"].map(|part| folder.join(part));
        let own = (room == "ringroad").then(|| root().join("examples"));
        parts.iter().chain(&own).filter(|part| part.exists()).for_each(|part| sources(part, &mut files));
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let lines = text.lines().filter(|line| has_unsafe(line)).count();
            if allowed.iter().any(|place| file.starts_with(place)) {
                seen += lines;
            } else {
                assert_eq!(lines, 0, "{} has unsafe code", file.display());
            }
        }
        let main = ["lib.rs", "main.rs"].iter().map(|name| folder.join("src").join(name)).find(|path| path.exists());
        let text = fs::read_to_string(main.unwrap()).unwrap();
        match room.as_str() {
            "mem" => {}
            "host" => assert!(text.contains("#![deny(unsafe_code)]") && text.matches("allow(unsafe_code").count() == 1),
            _ => assert!(text.contains("#![forbid(unsafe_code)]"), "{room} does not forbid unsafe code"),
        }
    }
    assert!(seen > 10, "the search finds what there is");
    assert!(has_unsafe("    unsafe { x }") && !has_unsafe("// unsafe") && !has_unsafe("forbid(unsafe_code)"));
}
