use proptest::prelude::*;
use rft_core::pack::{MAX_CAPACITY, Packed, Packing, arrange};

const ALL: [Packing; 5] = [Packing::Stream, Packing::Bfd, Packing::Even, Packing::Sequential, Packing::None];
const OPEN_BINS: usize = 32;

fn sums(packed: &Packed, lengths: &[u32]) -> Vec<u32> {
    (0..packed.len()).map(|bin| packed.bin(bin).iter().map(|item| lengths[*item as usize]).sum()).collect()
}

fn each_once(packed: &Packed, n: usize) -> bool {
    let mut items = packed.items.clone();
    items.sort_unstable();
    items.into_iter().eq(0..n as u32)
}

/// Item by item, with a scan over all bins.
fn plain_decreasing(lengths: &[u32], capacity: u32) -> usize {
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut spaces: Vec<u32> = Vec::new();
    for length in sorted {
        match spaces.iter_mut().filter(|space| **space >= length).min() {
            Some(space) => *space -= length,
            None => spaces.push(capacity - length),
        }
    }
    spaces.len()
}

/// Item by item over open bins that are all there from the start, and leave when the fullest has to make room.
fn plain_stream(lengths: &[u32], capacity: u32, order: &[u32]) -> Vec<Vec<u32>> {
    let mut closed: Vec<Vec<u32>> = Vec::new();
    let mut open: Vec<(u32, usize, Vec<u32>)> = (0..OPEN_BINS).map(|slot| (capacity, slot, Vec::new())).collect();
    for item in order {
        let length = lengths[*item as usize];
        match open.iter_mut().filter(|bin| bin.0 >= length).min_by_key(|bin| (bin.0, bin.1)) {
            Some(bin) => {
                bin.0 -= length;
                bin.2.push(*item);
            }
            None => {
                let bin = open.iter_mut().min_by_key(|bin| (bin.0, bin.1)).unwrap();
                closed.push(std::mem::replace(&mut bin.2, vec![*item]));
                bin.0 = capacity - length;
            }
        }
    }
    open.sort();
    closed.extend(open.into_iter().map(|bin| bin.2).filter(|bin| !bin.is_empty()));
    closed
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_strategy_packs_each_item_once_within_the_capacity(
        (capacity, lengths) in (1u32..400).prop_flat_map(|c| (Just(c), prop::collection::vec(1..=c, 0..300))),
        seed: u64, epoch in 0u64..3, shuffled: bool,
    ) {
        for packing in ALL {
            let shuffle = shuffled.then_some((seed, epoch));
            let packed = arrange(&lengths, capacity, packing, shuffle).unwrap();
            prop_assert!(each_once(&packed, lengths.len()));
            prop_assert!(sums(&packed, &lengths).iter().all(|sum| (1..=capacity).contains(sum)));
            prop_assert_eq!(&packed, &arrange(&lengths, capacity, packing, shuffle).unwrap());
        }
    }

    #[test]
    fn decreasing_best_fit_equals_the_plain_one(
        (capacity, lengths) in (1u32..400).prop_flat_map(|c| (Just(c), prop::collection::vec(1..=c, 0..300))),
        shuffled: bool,
    ) {
        let packed = arrange(&lengths, capacity, Packing::Bfd, shuffled.then_some((1, 0))).unwrap();
        prop_assert_eq!(packed.len(), plain_decreasing(&lengths, capacity));
    }

    #[test]
    fn streaming_best_fit_equals_the_plain_one(
        (capacity, lengths) in (1u32..200).prop_flat_map(|c| (Just(c), prop::collection::vec(1..=c, 0..1500))),
        seed: u64,
    ) {
        let bins = |packed: Packed| (0..packed.len()).map(|bin| packed.bin(bin).to_vec()).collect::<Vec<_>>();
        let order = rft_core::order::Permutation::new(lengths.len() as u32, seed, 4, 0).to_vec();
        let shuffled = bins(arrange(&lengths, capacity, Packing::Stream, Some((seed, 4))).unwrap());
        prop_assert_eq!(shuffled, plain_stream(&lengths, capacity, &order));
        let order: Vec<u32> = (0..lengths.len() as u32).collect();
        let as_given = bins(arrange(&lengths, capacity, Packing::Stream, None).unwrap());
        prop_assert_eq!(as_given, plain_stream(&lengths, capacity, &order));
    }
}

#[test]
fn large_sets_are_packed_tightly_and_without_a_cap_on_samples() {
    let mut random = rft_core::order::Random::new(1, 0, 0);
    let lengths: Vec<u32> = (0..100_000).map(|_| 1 + random.below(30).pow(2) as u32).collect();
    let bound = lengths.iter().map(|length| *length as usize).sum::<usize>().div_ceil(4096);
    let bins = |packing| arrange(&lengths, 4096, packing, Some((1, 0))).unwrap().len();
    assert!(bins(Packing::Bfd) <= bound + 1);
    assert!(bins(Packing::Stream) as f64 <= bound as f64 * 1.01 + 1.0);
    assert!(bins(Packing::Even) as f64 <= bound as f64 * 1.02 + 1.0);
    assert!(bins(Packing::Sequential) as f64 <= bound as f64 * 1.1);
    for packing in ALL.into_iter().filter(|packing| *packing != Packing::None) {
        assert_eq!(arrange(&vec![1; 100_000], 100_000, packing, Some((0, 0))).unwrap().len(), 1);
        // The largest bins, beyond the three levels of 64-bit words that 262,144 would need.
        let large = [MAX_CAPACITY - 100_000, 100_000, 5];
        assert_eq!(arrange(&large, MAX_CAPACITY, packing, None).unwrap().len(), 2);
    }
}

#[test]
fn the_order_of_rows_is_kept_where_it_is_asked_for() {
    let lengths: Vec<u32> = (0..1000).map(|n| 1 + n % 37).collect();
    let packed = arrange(&lengths, 100, Packing::Sequential, Some((5, 1))).unwrap();
    assert!(packed.items.iter().copied().eq(0..1000));
    // No item would have fitted into the bin before.
    let sums = sums(&packed, &lengths);
    for bin in 1..packed.len() {
        assert!(sums[bin - 1] + lengths[packed.bin(bin)[0] as usize] > 100);
    }
}

#[test]
fn even_bins_hold_like_mixes() {
    // Long and short items: best fit decreasing has bins of short ones alone, even has about as many of each in every bin.
    let lengths: Vec<u32> = (0..20_000).map(|n| if n % 10 == 0 { 900 } else { 40 }).collect();
    let spread = |packing| {
        let packed = arrange(&lengths, 4096, packing, Some((1, 0))).unwrap();
        let counts: Vec<usize> = (0..packed.len()).map(|bin| packed.bin(bin).len()).collect();
        counts.iter().max().unwrap() - counts.iter().min().unwrap()
    };
    assert!(spread(Packing::Even) < 30, "{}", spread(Packing::Even));
    assert!(spread(Packing::Bfd) > 60, "{}", spread(Packing::Bfd));
}
