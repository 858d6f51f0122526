use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rft_core::Kind;
use rft_core::store::{MANIFEST, Manifest, Store};

use crate::support::{document, set_of};

fn small(place: &Path) -> Store {
    set_of(
        place,
        &[(vec![1, 2, 3], vec![true, false, true]), (vec![], vec![]), (vec![65_535; 20], vec![true; 20])],
        Some(0.5),
    )
}

#[test]
fn a_damaged_byte_anywhere_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    small(&place);
    let files: Vec<_> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 6);
    for file in files {
        let good = fs::read(&file).unwrap();
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&file, &bad).unwrap();
            let opened = Store::open(&place);
            // White space behind the manifest's end is the one place that holds nothing.
            if !(file.ends_with(MANIFEST) && at == good.len() - 1) {
                let error = opened.err().unwrap_or_else(|| panic!("{} at {at}", file.display()));
                assert_eq!(error.kind, Kind::Store, "{error}");
            }
        }
        for length in [0, good.len() - 1] {
            fs::write(&file, &good[..length]).unwrap();
            assert!(length == good.len() - 1 && file.ends_with(MANIFEST) || Store::open(&place).is_err());
        }
        fs::write(&file, &good).unwrap();
        Store::open(&place).unwrap();
    }
}

#[test]
fn a_folder_without_a_manifest_is_no_set() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    small(&place);
    fs::remove_file(place.join(MANIFEST)).unwrap();
    let error = Store::open(&place).err().unwrap();
    assert!(error.problem.contains("manifest is missing") && !error.remedy.is_empty(), "{error}");
}

#[test]
fn another_version_is_told_apart_from_damage() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    let store = small(&place);
    let newer = Manifest { format_version: 99, ..store.manifest().clone() };
    fs::write(place.join(MANIFEST), newer.to_text().unwrap()).unwrap();
    assert!(Store::open(&place).err().unwrap().problem.contains("format version 99"));
}

#[test]
fn a_set_takes_the_place_of_another_and_of_a_broken_one() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("tokens.bin"), b"half").unwrap();
    small(&place);
    let again = small(&place);
    assert_eq!(again.num_documents(), 3);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary folders are left");
}

#[test]
fn two_writers_of_one_set_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| small(&place));
        }
    });
    assert_eq!(Store::open(&place).unwrap().num_tokens(), 23);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_is_written_is_read(
        documents in prop::collection::vec(prop::collection::vec((0u32..65_536, any::<bool>()), 0..70), 1..20),
        weight in prop::option::of(0.0f32..4.0),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let documents: Vec<(Vec<u32>, Vec<bool>)> = documents.into_iter().map(|tokens| tokens.into_iter().unzip()).collect();
        let store = set_of(&folder.path().join("set"), &documents, weight);
        for (index, wanted) in documents.iter().enumerate() {
            prop_assert_eq!(&document(&store, index), wanted);
            prop_assert_eq!(store.count_trained(store.range(index)) as usize, wanted.1.iter().filter(|bit| **bit).count());
            let own = if index % 2 == 1 { weight.unwrap_or(1.0) } else { 1.0 };
            prop_assert!(store.range(index).all(|token| store.weight(token) == own));
            prop_assert_eq!(store.origin(index).1, index as u64 + 1);
            for start in [0, wanted.1.len() / 3] {
                let range = store.range(index).start + start..store.range(index).end;
                let mut bits = vec![false; range.len()];
                let mut last = 0;
                for run in store.trained_runs(range) {
                    prop_assert!(run.start < run.end && (run.start > last || last == 0), "{run:?} after {last}");
                    last = run.end;
                    bits[run].fill(true);
                }
                prop_assert_eq!(&bits, &wanted.1[start..]);
            }
        }
    }
}
