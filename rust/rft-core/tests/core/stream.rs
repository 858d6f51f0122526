use std::sync::Arc;

use proptest::prelude::*;
use rft_core::plan::{Overlong, Packing, Plan, PlanOptions};
use rft_core::store::Store;
use rft_core::stream::{Share, Slot, Stream, Taken};

use crate::support::set_of;

const PAD: i64 = -7;

/// A slot's buffers.
struct Memory {
    ids: Vec<i64>,
    labels: Vec<i64>,
    positions: Vec<i64>,
    cu_seqlens: Vec<i32>,
    weights: Vec<f32>,
}

impl Memory {
    fn new(capacity: usize) -> Memory {
        Memory {
            ids: vec![99; capacity],
            labels: vec![99; capacity],
            positions: vec![99; capacity],
            cu_seqlens: vec![99; capacity + 1],
            weights: vec![99.0; capacity],
        }
    }

    fn slot(&mut self, number: usize) -> Slot {
        Slot {
            number,
            ids: self.ids.as_mut_ptr() as usize,
            labels: self.labels.as_mut_ptr() as usize,
            positions: self.positions.as_mut_ptr() as usize,
            cu_seqlens: self.cu_seqlens.as_mut_ptr() as usize,
            weights: Some(self.weights.as_mut_ptr() as usize),
        }
    }
}

fn submit(stream: &Stream, memory: &mut Memory, number: usize) {
    // SAFETY: the buffers have the stream's capacity, and each test leaves them alone until the slot is taken or the
    // stream is closed.
    unsafe { stream.submit(memory.slot(number)) }.unwrap();
}

/// Everything that one rank is given from a step on, with three slots in flight.
fn all(plan: &Arc<Plan>, share: Share, start: usize) -> Vec<(Taken, Memory)> {
    let capacity = share.micro_batch * plan.options().seq_len as usize;
    let stream = Stream::new(plan.clone(), share, start, PAD, capacity).unwrap();
    let mut memory: Vec<Memory> = (0..3).map(|_| Memory::new(capacity)).collect();
    for (number, memory) in memory.iter_mut().enumerate() {
        submit(&stream, memory, number);
    }
    let mut taken = Vec::new();
    while let Some(next) = stream.take().unwrap() {
        let slot = next.slot;
        let full = std::mem::replace(&mut memory[slot], Memory::new(capacity));
        submit(&stream, &mut memory[slot], slot);
        taken.push((next, full));
    }
    stream.close();
    stream.close();
    taken
}

fn plan_of(store: Arc<Store>, seq_len: u32, packing: Packing) -> Arc<Plan> {
    let options = PlanOptions { seq_len, packing, overlong: Overlong::Split, seed: 1, epoch: 0, shuffle: true };
    Arc::new(Plan::new(store, options).unwrap())
}

fn share(rank: usize, world_size: usize, micro_batch: usize, packs_per_step: usize) -> Share {
    Share { rank, world_size, micro_batch, packs_per_step, first_pack: 0, balance: true }
}

#[test]
fn labels_shift_once_and_documents_do_not_see_each_other() {
    // BO-01: A = 11..15 and B = 21..23, both trained on, packs of 8.
    let folder = tempfile::tempdir().unwrap();
    let documents = [((11..16).collect(), vec![true; 5]), ((21..24).collect(), vec![true; 3])];
    let store = Arc::new(set_of(&folder.path().join("set"), &documents, None));
    let options = PlanOptions {
        seq_len: 8,
        packing: Packing::Stream,
        overlong: Overlong::Split,
        seed: 0,
        epoch: 0,
        shuffle: false,
    };
    let plan = Arc::new(Plan::new(store, options).unwrap());
    let taken = all(&plan, share(0, 1, 1, 1), 0);
    let [(next, memory)] = taken.as_slice() else { panic!("one micro-batch") };
    assert_eq!(memory.ids, [11, 12, 13, 14, 15, 21, 22, 23]);
    assert_eq!(memory.labels, [12, 13, 14, 15, -100, 22, 23, -100]);
    assert_eq!(memory.positions, [0, 1, 2, 3, 4, 0, 1, 2]);
    assert_eq!(memory.cu_seqlens[..3], [0, 5, 8]);
    assert_eq!((next.filled.num_label_tokens, next.filled.label_weight), (6, 6.0));
}

#[test]
fn two_ranks_run_equally_many_steps_over_five_packs() {
    // BO-03: five rows of 8 tokens, packs of 8, two ranks.
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<_> = (0..5).map(|n| (vec![n + 1; 8], vec![true; 8])).collect();
    let plan = plan_of(Arc::new(set_of(&folder.path().join("set"), &documents, None)), 8, Packing::Stream);
    let ranks: Vec<_> = (0..2).map(|rank| all(&plan, share(rank, 2, 1, 2), 0)).collect();
    assert_eq!((ranks[0].len(), ranks[1].len()), (3, 3));
    let tokens: u64 = ranks.iter().flatten().map(|(taken, _)| taken.filled.num_tokens).sum();
    assert_eq!(tokens, 40);
    let (filler, memory) = &ranks[1][2];
    assert_eq!((filler.filled.num_label_tokens, filler.filled.label_weight), (0, 0.0));
    assert_eq!(filler.filled.pack_tokens, [0]);
    assert!(memory.labels.iter().all(|label| *label == -100) && memory.weights.iter().all(|weight| *weight == 0.0));
}

#[test]
fn weights_follow_the_label_they_belong_to() {
    let folder = tempfile::tempdir().unwrap();
    let documents = [(vec![1, 2, 3], vec![false, true, true]), (vec![4, 5, 6], vec![true, false, true])];
    let store = Arc::new(set_of(&folder.path().join("set"), &documents, Some(0.25)));
    assert!(store.has_weights());
    let options = PlanOptions {
        seq_len: 8,
        packing: Packing::Stream,
        overlong: Overlong::Split,
        seed: 0,
        epoch: 0,
        shuffle: false,
    };
    let plan = Arc::new(Plan::new(store, options).unwrap());
    let taken = all(&plan, share(0, 1, 1, 1), 0);
    assert_eq!(taken[0].1.labels, [2, 3, -100, -100, 6, -100, -100, -100]);
    assert_eq!(taken[0].1.weights, [1.0, 1.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0]);
    assert_eq!(taken[0].0.filled.label_weight, 2.25);
}

#[test]
fn misuse_is_told_and_never_waits() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(set_of(&folder.path().join("set"), &[(vec![1, 2], vec![true, true])], None));
    let plan = plan_of(store, 8, Packing::Stream);
    for bad in [share(2, 2, 1, 2), share(0, 2, 1, 3), share(0, 0, 1, 1), share(0, 1, 0, 1)] {
        assert!(Stream::new(plan.clone(), bad, 0, PAD, 8).is_err());
    }
    assert!(Stream::new(plan.clone(), share(0, 1, 1, 1), 2, PAD, 8).is_err());
    let stream = Stream::new(plan.clone(), share(0, 1, 1, 1), 0, PAD, 8).unwrap();
    assert!(stream.take().unwrap_err().problem.contains("no buffers"));
    stream.close();
    assert!(stream.take().unwrap_err().problem.contains("closed"));
    // A buffer that is too small is an error of `take`, not a crash of the thread.
    let small = Stream::new(plan.clone(), share(0, 1, 1, 1), 0, PAD, 4).unwrap();
    let mut memory = Memory::new(4);
    submit(&small, &mut memory, 0);
    assert!(small.take().unwrap_err().problem.contains("does not fit"));
    let at_end = Stream::new(plan, share(0, 1, 1, 1), 1, PAD, 8).unwrap();
    let mut memory = Memory::new(8);
    submit(&at_end, &mut memory, 0);
    assert!(at_end.take().unwrap().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn ranks_share_the_plan_exactly_and_resume_exactly(
        documents in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..30), 1..40),
        world_size in 1usize..4, micro_batch in 1usize..3, accumulate in 1usize..3, none: bool, weighted: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let documents: Vec<_> = documents
            .into_iter()
            .enumerate()
            .map(|(n, mut bits)| {
                bits.push(true);
                let ids: Vec<u32> = (0..bits.len() as u32).map(|at| n as u32 * 100 + at + 1).collect();
                (ids, bits)
            })
            .collect();
        let store = Arc::new(set_of(&folder.path().join("set"), &documents, weighted.then_some(0.5)));
        let plan = plan_of(store, 16, if none { Packing::None } else { Packing::Stream });
        let per_step = world_size * micro_batch * accumulate;
        let ranks: Vec<Vec<(Taken, Memory)>> =
            (0..world_size).map(|rank| all(&plan, share(rank, world_size, micro_batch, per_step), 0)).collect();
        let steps = |rank: &[(Taken, Memory)]| rank.iter().map(|(taken, _)| (taken.step, taken.last)).collect::<Vec<_>>();
        for rank in &ranks {
            prop_assert_eq!(steps(rank), steps(&ranks[0]));
            prop_assert_eq!(rank.iter().filter(|(taken, _)| taken.last).count(), plan.num_packs().div_ceil(per_step));
        }
        let sum = |of: fn(&Taken) -> u64| ranks.iter().flatten().map(|(taken, _)| of(taken)).sum::<u64>();
        prop_assert_eq!(sum(|taken| taken.filled.num_tokens), plan.num_tokens());
        prop_assert_eq!(sum(|taken| taken.filled.num_label_tokens), plan.num_label_tokens());
        // Every step holds the same documents at every world size.
        let alone = all(&plan, share(0, 1, 1, per_step), 0);
        let ids = |list: &[&(Taken, Memory)], step: usize| {
            let mut ids: Vec<i64> = list
                .iter()
                .filter(|(taken, _)| taken.step == step)
                .flat_map(|(taken, memory)| memory.ids[..taken.filled.tokens].iter().copied().filter(|id| *id != PAD))
                .collect();
            ids.sort_unstable();
            ids
        };
        let together: Vec<_> = ranks.iter().flatten().collect();
        for step in 0..plan.num_packs().div_ceil(per_step) {
            prop_assert_eq!(ids(&together, step), ids(&alone.iter().collect::<Vec<_>>(), step));
        }
        // From step 1 on: the rest of what was given from step 0 on.
        let start = 1.min(plan.num_packs().div_ceil(per_step));
        let resumed = all(&plan, share(0, world_size, micro_batch, per_step), start);
        let rest: Vec<_> = ranks[0].iter().filter(|(taken, _)| taken.step >= start).collect();
        prop_assert_eq!(resumed.len(), rest.len());
        for ((again, now), (before, then)) in resumed.iter().zip(rest) {
            let n = before.filled.tokens;
            prop_assert_eq!(&again.filled, &before.filled);
            prop_assert_eq!(&now.ids[..n], &then.ids[..n]);
            prop_assert_eq!(&now.labels[..n], &then.labels[..n]);
            prop_assert_eq!(&now.weights[..n], &then.weights[..n]);
        }
        // What is written agrees with itself.
        for (taken, memory) in ranks.iter().flatten() {
            let filled = &taken.filled;
            prop_assert_eq!(filled.lengths.iter().sum::<u32>() as usize, filled.tokens);
            let borders: Vec<i32> = memory.cu_seqlens[..filled.lengths.len() + 1].to_vec();
            prop_assert_eq!(*borders.last().unwrap() as usize, filled.tokens);
            for pair in borders.windows(2) {
                let (start, end) = (pair[0] as usize, pair[1] as usize);
                prop_assert!(memory.positions[start..end].iter().copied().eq(0..(end - start) as i64));
                prop_assert_eq!(memory.labels[end - 1], -100);
                for at in start..end - 1 {
                    prop_assert!(memory.labels[at] == -100 || memory.labels[at] == memory.ids[at + 1]);
                }
            }
            let weight: f64 = memory.weights[..filled.tokens].iter().map(|weight| f64::from(*weight)).sum();
            prop_assert_eq!(weight, filled.label_weight);
            if none {
                let longest = filled.pack_tokens.iter().max().copied().unwrap_or(0).max(1) as usize;
                prop_assert_eq!(filled.tokens, longest.next_multiple_of(64).min(16) * micro_batch);
            }
        }
    }
}
