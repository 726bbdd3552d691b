//! Which file of a room imports which, through re-exports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};
use syn::{Item, UseTree, Visibility, visit::Visit};

/// A module by its path from the crate's root; the root itself is empty.
pub type Module = Vec<String>;

#[derive(Default)]
struct File {
    /// What it imports or names, by paths from the crate's root.
    uses: Vec<Module>,
    /// What it re-exports: name and origin.
    exports: BTreeMap<String, Module>,
}

/// Returns the modules of a room that each module imports, tests apart.
pub fn imports(source: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut files = BTreeMap::new();
    collect(source, &mut Vec::new(), &mut files);
    let names: BTreeSet<Module> = files.keys().cloned().collect();
    let parsed: BTreeMap<Module, File> =
        files.into_iter().map(|(module, text)| (module.clone(), parse(&module, &text, &names))).collect();
    let imported = |(module, file): (&Module, &File)| {
        let targets = file.uses.iter().map(|path| origin(path, &parsed, 0));
        (module.clone(), targets.filter(|target| target != module).collect())
    };
    parsed.iter().map(imported).collect()
}

fn collect(folder: &Path, at: &mut Module, files: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if name == "tests" {
            continue;
        }
        if path.is_dir() {
            at.push(name);
            collect(&path, at, files);
            at.pop();
        } else {
            // Beside a program, the library is a module that nothing imports.
            let is_root = ["main", "mod"].contains(&&*name) || name == "lib" && !folder.join("main.rs").exists();
            let last = (!is_root).then_some(name);
            files.insert(at.iter().cloned().chain(last).collect(), fs::read_to_string(&path).unwrap());
        }
    }
}

fn parse(module: &Module, text: &str, names: &BTreeSet<Module>) -> File {
    let mut file = File::default();
    for item in syn::parse_file(text).unwrap().items {
        match item {
            // Tests may import what they like.
            Item::Mod(inner) if inner.ident == "tests" => {}
            Item::Use(import) => {
                let mut paths = Vec::new();
                flatten(&import.tree, &mut Vec::new(), &mut paths);
                let paths = paths.into_iter().filter_map(|path| absolute(module, path, names));
                match import.vis {
                    Visibility::Inherited => file.uses.extend(paths),
                    _ => file.exports.extend(paths.filter_map(|path| Some((path.last()?.clone(), path)))),
                }
            }
            other => Paths { module, names, found: &mut file.uses }.visit_item(&other),
        }
    }
    file
}

/// Finds paths within items, such as `super::limits::Lines`.
struct Paths<'a> {
    module: &'a Module,
    names: &'a BTreeSet<Module>,
    found: &'a mut Vec<Module>,
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 {
            self.found.extend(absolute(self.module, segments, self.names));
        }
        syn::visit::visit_path(self, path);
    }
}

fn flatten(tree: &UseTree, before: &mut Module, paths: &mut Vec<Module>) {
    let mut with = |name: &syn::Ident, next: Option<&UseTree>| {
        before.push(name.to_string());
        match next {
            Some(next) => flatten(next, before, paths),
            None => paths.push(before.clone()),
        }
        before.pop();
    };
    match tree {
        UseTree::Path(path) => with(&path.ident, Some(&path.tree)),
        UseTree::Name(name) => with(&name.ident, None),
        UseTree::Rename(rename) => with(&rename.ident, None),
        UseTree::Glob(_) => paths.push(before.clone()),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, paths)),
    }
}

/// Returns a path from the root of the crate; `None` if it leads to another crate.
fn absolute(module: &Module, path: Module, names: &BTreeSet<Module>) -> Option<Module> {
    let supers = path.iter().take_while(|segment| *segment == "super").count();
    let (from, rest) = match path.first()?.as_str() {
        "crate" => (0, 1),
        "self" => (module.len(), 1),
        "super" => (module.len().checked_sub(supers)?, supers),
        first => {
            let child: Module = module.iter().cloned().chain([first.to_owned()]).collect();
            names.contains(&child).then_some((module.len(), 0))?
        }
    };
    Some(module[..from].iter().chain(&path[rest..]).cloned().collect())
}

/// Returns the module in which something is, through re-exports.
fn origin(path: &Module, files: &BTreeMap<Module, File>, depth: usize) -> Module {
    assert!(depth < 20, "re-exports of {path:?} lead in a circle");
    let length = (0..=path.len()).rev().find(|&length| files.contains_key(&path[..length])).unwrap();
    let module = path[..length].to_vec();
    match path.get(length).and_then(|name| files[&module].exports.get(name)) {
        Some(target) => origin(target, files, depth + 1),
        None => module,
    }
}

/// Returns a circle of imports, if there is one.
pub fn circle(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Option<Vec<Module>> {
    let mut left = imports.clone();
    // Removes what imports nothing that is left, until only circles are left, and what leads to them.
    loop {
        let done: Vec<Module> = left
            .iter()
            .filter(|(_, targets)| targets.iter().all(|target| !left.contains_key(target)))
            .map(|(module, _)| module.clone())
            .collect();
        if done.is_empty() {
            break;
        }
        done.iter().for_each(|module| _ = left.remove(module));
    }
    let mut way = vec![left.keys().next()?.clone()];
    loop {
        let next = left[way.last().unwrap()].iter().find(|target| left.contains_key(*target)).unwrap().clone();
        if let Some(start) = way.iter().position(|module| *module == next) {
            return Some(way.split_off(start));
        }
        way.push(next);
    }
}
