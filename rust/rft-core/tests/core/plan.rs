use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use proptest::prelude::*;
use rft_core::Kind;
use rft_core::plan::{Overlong, Packing, Plan, PlanOptions};
use rft_core::store::Store;

use crate::support::set_of;

fn options(seq_len: u32) -> PlanOptions {
    PlanOptions { seq_len, packing: Packing::Stream, overlong: Overlong::Split, seed: 7, epoch: 0, shuffle: true }
}

fn all_trained(lengths: &[usize]) -> (tempfile::TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let mut next = 1;
    let mut ids = |n: usize| -> Vec<u32> {
        next += n as u32;
        (next - n as u32..next).collect()
    };
    let documents: Vec<_> = lengths.iter().map(|n| (ids(*n), vec![true; *n])).collect();
    let store = set_of(&folder.path().join("set"), &documents, None);
    (folder, Arc::new(store))
}

fn ids_of(plan: &Plan) -> Vec<u32> {
    (0..plan.num_packs())
        .flat_map(|pack| plan.pack(pack).collect::<Vec<_>>())
        .flat_map(|piece| plan.store().ids(plan.tokens_of(piece)).to_vec())
        .collect()
}

#[test]
fn overlong_rows_are_split_cut_or_named_and_always_counted() {
    // BO-02: rows of ids 1..4, 5 6, 7 8 9, 10 and packs of 3.
    let (_folder, store) = all_trained(&[4, 2, 3, 1]);
    let plan = |overlong| Plan::new(store.clone(), PlanOptions { overlong, ..options(3) });
    let split = plan(Overlong::Split).unwrap();
    let mut ids = ids_of(&split);
    ids.sort_unstable();
    assert_eq!((ids, split.num_packs()), ((1..=10).collect(), 4));
    let cut = plan(Overlong::Truncate).unwrap();
    assert_eq!((cut.num_tokens(), cut.counts().truncated_tokens, cut.counts().truncated_documents), (9, 1, 1));
    let dropped = plan(Overlong::Drop).unwrap();
    assert_eq!((dropped.num_tokens(), dropped.counts().dropped_tokens, dropped.counts().dropped_documents), (6, 4, 1));
    let error = plan(Overlong::Error).err().unwrap();
    assert!(error.problem.contains("4 tokens"), "{error}");
}

#[test]
fn a_small_set_is_one_pack() {
    for packing in [Packing::Stream, Packing::Bfd, Packing::Even, Packing::Sequential] {
        let (_folder, store) = all_trained(&[10, 20, 20]);
        let plan = Plan::new(store, PlanOptions { packing, ..options(4096) }).unwrap();
        assert_eq!((plan.num_packs(), plan.num_tokens(), plan.num_label_tokens()), (1, 50, 47));
    }
}

#[test]
fn a_document_whose_trained_tokens_are_cut_off_is_left_out_and_counted() {
    // BO-21: 50 tokens of prompt before the trained ones, packs of 16.
    let folder = tempfile::tempdir().unwrap();
    let document = |prompt: usize| {
        let bits: Vec<bool> = (0..prompt + 4).map(|at| at >= prompt).collect();
        ((1..=prompt as u32 + 4).collect::<Vec<u32>>(), bits)
    };
    let cut = |store: Arc<Store>| Plan::new(store, PlanOptions { overlong: Overlong::Truncate, ..options(16) });
    let mixed = Arc::new(set_of(&folder.path().join("mixed"), &[document(50), document(2)], None));
    let plan = cut(mixed).unwrap();
    assert_eq!((plan.counts().unlabelled_documents, plan.num_tokens(), plan.num_label_tokens()), (1, 6, 4));
    let only = Arc::new(set_of(&folder.path().join("only"), &[document(50), document(50)], None));
    let error = cut(only).err().unwrap();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.problem.contains("no token to train on"), "{error}");
}

#[test]
fn the_plan_follows_each_of_its_arguments() {
    let (_folder, store) = all_trained(&(1..200).collect::<Vec<_>>());
    let base = options(256);
    let hash = |options| Plan::new(store.clone(), options).unwrap().hash().to_string();
    let others = [
        PlanOptions { seq_len: 255, ..base },
        PlanOptions { packing: Packing::Bfd, ..base },
        PlanOptions { packing: Packing::Even, ..base },
        PlanOptions { packing: Packing::Sequential, ..base },
        PlanOptions { packing: Packing::None, ..base },
        PlanOptions { overlong: Overlong::Drop, ..base },
        PlanOptions { seed: 8, ..base },
        PlanOptions { epoch: 1, ..base },
        PlanOptions { shuffle: false, ..base },
    ];
    let hashes: HashSet<String> = others.into_iter().chain([base]).map(hash).collect();
    assert_eq!(hashes.len(), 10);
    assert_eq!(hash(base), hash(base));
}

#[test]
fn without_shuffling_single_rows_keep_the_order_of_the_set() {
    let (_folder, store) = all_trained(&[3, 9, 4]);
    let plan = Plan::new(store, PlanOptions { packing: Packing::None, shuffle: false, ..options(8) }).unwrap();
    assert_eq!(ids_of(&plan), (1..=16).collect::<Vec<u32>>());
    assert_eq!(plan.pack_tokens(), [3, 8, 1, 4]);
}

/// The variance between batches of 32 packs of the mean log length, over what a random composition would give.
fn batch_ratio(packing: Packing) -> f64 {
    let mut random = rft_core::order::Random::new(3, 0, 9);
    let normal = |random: &mut rft_core::order::Random| {
        (0..12).map(|_| random.below(1 << 20) as f64 / 1048576.0).sum::<f64>() - 6.0
    };
    let lengths: Vec<usize> =
        (0..40_000).map(|_| ((280.0 * (0.85 * normal(&mut random)).exp()) as usize).clamp(4, 4096)).collect();
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<_> = lengths.iter().map(|n| (vec![1; *n], vec![true; *n])).collect();
    let store = Arc::new(set_of(&folder.path().join("set"), &documents, None));
    let plan = Plan::new(store, PlanOptions { packing, ..options(4096) }).unwrap();
    let logs = |pack: usize| plan.pack(pack).map(|piece| f64::from(piece.length).ln()).collect::<Vec<f64>>();
    let all: Vec<f64> = (0..plan.num_packs()).flat_map(logs).collect();
    let mean = |list: &[f64]| list.iter().sum::<f64>() / list.len() as f64;
    let spread = |list: &[f64]| {
        let center = mean(list);
        list.iter().map(|x| (x - center).powi(2)).sum::<f64>() / list.len() as f64
    };
    let batches: Vec<Vec<f64>> =
        (0..plan.num_packs() / 32).map(|batch| (batch * 32..batch * 32 + 32).flat_map(logs).collect()).collect();
    let found = spread(&batches.iter().map(|batch| mean(batch)).collect::<Vec<f64>>());
    let whole = spread(&all);
    let random = batches.iter().map(|batch| whole / batch.len() as f64).sum::<f64>() / batches.len() as f64;
    found / random
}

#[test]
fn stream_batches_are_composed_as_random_ones_and_bfd_batches_are_not() {
    let (stream, bfd, even) = (batch_ratio(Packing::Stream), batch_ratio(Packing::Bfd), batch_ratio(Packing::Even));
    assert!((0.7..1.4).contains(&stream), "{stream}");
    assert!(bfd > 5.0, "{bfd}");
    assert!(even < 0.5, "{even}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_token_is_in_one_pack_or_counted(
        documents in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..60), 1..40),
        seq_len in 2u32..50, packing in 0usize..5, overlong in 0usize..3, epoch in 0u64..3, shuffle: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let documents: Vec<_> = documents.into_iter().map(|bits| (vec![5u32; bits.len()], bits)).collect();
        let store = Arc::new(set_of(&folder.path().join("set"), &documents, None));
        let options = PlanOptions {
            seq_len,
            packing: [Packing::Stream, Packing::Bfd, Packing::Even, Packing::Sequential, Packing::None][packing],
            overlong: [Overlong::Split, Overlong::Truncate, Overlong::Drop][overlong],
            seed: 3,
            epoch,
            shuffle,
        };
        let plan = match Plan::new(store.clone(), options) {
            Ok(plan) => plan,
            Err(error) => {
                prop_assert!(error.problem.contains("no token to train on"));
                return Ok(());
            }
        };
        let counts = plan.counts();
        prop_assert_eq!(
            plan.num_tokens() + counts.truncated_tokens + counts.dropped_tokens + counts.unlabelled_tokens,
            store.num_tokens()
        );
        let mut seen: HashMap<(u32, u32), u32> = HashMap::new();
        let mut labels = 0;
        for pack in 0..plan.num_packs() {
            let pieces: Vec<_> = plan.pack(pack).collect();
            prop_assert!(pieces.iter().map(|piece| piece.length).sum::<u32>() <= seq_len);
            prop_assert_eq!(pieces.iter().map(|piece| piece.length).sum::<u32>(), plan.pack_tokens()[pack]);
            for piece in pieces {
                let bits = &documents[piece.document as usize].1[piece.start as usize..(piece.start + piece.length) as usize];
                prop_assert!(bits.contains(&true));
                labels += bits[1..].iter().filter(|bit| **bit).count() as u64;
                for token in piece.start..piece.start + piece.length {
                    *seen.entry((piece.document, token)).or_default() += 1;
                }
            }
        }
        prop_assert!(seen.values().all(|times| *times == 1));
        prop_assert_eq!(plan.num_label_tokens(), labels);
    }
}
