use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;
use rft_core::Kind;
use rft_core::store::{MANIFEST, Manifest, Store, verify};

use crate::support::{document, set_of, set_of_shards};

fn small(place: &Path) -> Store {
    set_of(
        place,
        &[(vec![1, 2, 3], vec![true, false, true]), (vec![], vec![]), (vec![65_535; 20], vec![true; 20])],
        Some(0.5),
    )
}

/// Three shards: bits and spans, weights and none, offsets and lines.
fn several(place: &Path) -> Store {
    let documents: Vec<(Vec<u32>, Vec<bool>)> = (0..90u32)
        .map(|n| {
            let ids: Vec<u32> = (0..n % 40).map(|id| id * 977 % 65_536).collect();
            let bits = ids.iter().map(|id| if n < 30 { id % 2 == 0 } else { n % 3 == 0 }).collect();
            (ids, bits)
        })
        .collect();
    set_of_shards(place, &documents, None, 1200)
}

fn files_of(place: &Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// 1,000 flipped bits and as many truncations, anywhere in the files of a set: opening fails and verifying says where.
#[test]
fn every_flipped_bit_and_every_truncation_is_found() {
    let folder = tempfile::tempdir().unwrap();
    for (name, make) in [("one", small as fn(&Path) -> Store), ("several", several)] {
        let place = folder.path().join(name);
        let store = make(&place);
        assert!(verify(&place).problems.is_empty());
        let files = files_of(&place);
        assert_eq!(files.len(), 1 + store.shards().len());
        let found = |file: &Path, what: &str| {
            let error = Store::open(&place).err().unwrap_or_else(|| panic!("{}: {what}", file.display()));
            assert_eq!(error.kind, Kind::Store, "{error}");
            let problems = verify(&place).problems;
            assert!(problems.iter().any(|p| p.file == file.display().to_string()), "{what}: {problems:?}");
        };
        let mut random = 0x2545_f491_4f6c_dd1du64;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random as usize % below
        };
        for round in 0..500 {
            let file = &files[next(files.len())];
            let good = fs::read(file).unwrap();
            // Most of a small shard is its header's zeros: every other flip is behind them.
            let start = if round % 2 == 0 && good.len() > 4096 { 4096 } else { 0 };
            let at = start + next(good.len() - start);
            // In place: a file that is emptied and written again is flushed by some file systems, 1,000 times here.
            let open = fs::OpenOptions::new().write(true).open(file).unwrap();
            open.write_all_at(&[good[at] ^ 1 << next(8)], at as u64).unwrap();
            found(file, &format!("byte {at}"));
            open.write_all_at(&[good[at]], at as u64).unwrap();
            let length = start + next(good.len() - start);
            open.set_len(length as u64).unwrap();
            found(file, &format!("cut at {length}"));
            open.write_all_at(&good[length..], length as u64).unwrap();
        }
        let last = fs::read(files.last().unwrap()).unwrap();
        fs::write(files.last().unwrap(), [last.as_slice(), b"\n"].concat()).unwrap();
        found(files.last().unwrap(), "a byte more");
        fs::write(files.last().unwrap(), last).unwrap();
        Store::open(&place).unwrap();
        fs::rename(&files[0], place.join("away")).unwrap();
        assert!(!verify(&place).problems.is_empty() && Store::open(&place).is_err());
    }
}

#[test]
fn damage_is_told_by_block_and_section() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    let ids: Vec<u32> = (0..4_200_000).map(|id| id % 60_000).collect();
    let bits = vec![true; ids.len()];
    let store = set_of(&place, &[(ids, bits)], None);
    let file = place.join(&store.manifest().shards[0].file);
    let mut bytes = fs::read(&file).unwrap();
    bytes[4096 + (4 << 20) + 5] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let told: Vec<String> = verify(&place).problems.into_iter().map(|p| p.problem).collect();
    assert_eq!(told, ["section tokens is not what was written", "bytes 4198400 to 8392704 are not what was written"]);
}

#[test]
fn a_shard_of_another_set_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("set");
    several(&place);
    let files = files_of(&place);
    let (first, second) = (fs::read(&files[0]).unwrap(), fs::read(&files[1]).unwrap());
    fs::write(&files[0], &second).unwrap();
    fs::write(&files[1], &first).unwrap();
    assert!(Store::open(&place).is_err());
    assert_eq!(verify(&place).problems.len(), 2);
}

#[test]
fn the_mask_takes_the_shorter_form() {
    let folder = tempfile::tempdir().unwrap();
    let encoding = |name: &str, bits: Vec<bool>| {
        let store = set_of(&folder.path().join(name), &[(vec![7; bits.len()], bits)], None);
        let entry = store.shards()[0].footer().sections.iter().find(|entry| entry.name == "mask").unwrap().clone();
        (entry.encoding, entry.bytes)
    };
    assert_eq!(encoding("all", vec![true; 1000]), ("spans".into(), 8));
    assert_eq!(encoding("none", vec![false; 1000]), ("spans".into(), 0));
    assert_eq!(encoding("mixed", (0..1000).map(|n| n % 3 == 0).collect()), ("bits".into(), 125));
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
    fs::write(place.join("data-00000.rft"), b"half").unwrap();
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
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_is_written_is_read(
        documents in prop::collection::vec(prop::collection::vec((0u32..65_536, any::<bool>()), 0..70), 1..20),
        weight in prop::option::of(0.0f32..4.0),
        shard_bytes in prop::sample::select(&[150u64, 1 << 20][..]),
        dense in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let documents: Vec<(Vec<u32>, Vec<bool>)> = documents
            .into_iter()
            .map(|tokens| tokens.into_iter().map(|(id, bit)| (id, if dense { id < 60_000 } else { bit })).unzip())
            .collect();
        let store = set_of_shards(&folder.path().join("set"), &documents, weight, shard_bytes);
        prop_assert_eq!(store.num_documents(), documents.len());
        for (index, wanted) in documents.iter().enumerate() {
            prop_assert_eq!(&document(&store, index), wanted);
            prop_assert_eq!(store.count_trained(store.range(index)) as usize, wanted.1.iter().filter(|bit| **bit).count());
            let own = if index % 2 == 1 { weight.unwrap_or(1.0) } else { 1.0 };
            prop_assert!(store.range(index).all(|token| store.weight(token) == own));
            prop_assert_eq!(store.origin(index).1, index as u64 + 1);
            for (start, token) in store.range(index).enumerate() {
                let bits = wanted.1[start..].iter().take(64).rev().fold(0u64, |bits, bit| bits << 1 | u64::from(*bit));
                let known = u64::MAX >> (64 - (wanted.1.len() - start).min(64));
                prop_assert_eq!(store.trained_bits(token) & known, bits);
            }
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
