use proptest::prelude::*;
use rft_core::pack::{Packed, best_fit_decreasing, best_fit_stream};

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

/// Item by item, with a scan over the open bins, which are kept in the order of their last change.
fn plain_stream(lengths: &[u32], capacity: u32, open: usize) -> Vec<Vec<u32>> {
    let mut bins: Vec<Vec<u32>> = Vec::new();
    let mut live: Vec<(u32, usize)> = Vec::new();
    for (item, length) in lengths.iter().enumerate() {
        let best = live
            .iter()
            .enumerate()
            .filter(|(_, bin)| bin.0 >= *length)
            .min_by_key(|(at, bin)| (bin.0, *at))
            .map(|(at, _)| at);
        let (space, bin) = match best {
            Some(at) => live.remove(at),
            None => {
                bins.push(Vec::new());
                (capacity, bins.len() - 1)
            }
        };
        bins[bin].push(item as u32);
        if space > *length {
            live.push((space - length, bin));
        }
        if live.len() > open {
            let at = live.iter().enumerate().min_by_key(|(at, bin)| (bin.0, *at)).map(|(at, _)| at).unwrap();
            live.remove(at);
        }
    }
    bins
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn decreasing_best_fit_equals_the_plain_one(
        (capacity, lengths) in (1u32..400).prop_flat_map(|c| (Just(c), prop::collection::vec(1..=c, 0..300)))
    ) {
        let packed = best_fit_decreasing(&lengths, capacity).unwrap();
        prop_assert!(each_once(&packed, lengths.len()));
        prop_assert!(sums(&packed, &lengths).iter().all(|sum| (1..=capacity).contains(sum)));
        prop_assert_eq!(packed.len(), plain_decreasing(&lengths, capacity));
    }

    #[test]
    fn streaming_best_fit_equals_the_plain_one(
        (capacity, lengths) in (1u32..200).prop_flat_map(|c| (Just(c), prop::collection::vec(1..=c, 0..200))),
        open in 1usize..20,
    ) {
        let packed = best_fit_stream(&lengths, capacity, open).unwrap();
        let bins: Vec<Vec<u32>> = (0..packed.len()).map(|bin| packed.bin(bin).to_vec()).collect();
        prop_assert_eq!(bins, plain_stream(&lengths, capacity, open));
    }
}

#[test]
fn large_sets_are_packed_tightly_and_without_a_cap_on_samples() {
    let mut random = rft_core::order::Random::new(1, 0, 0);
    let lengths: Vec<u32> = (0..100_000).map(|_| 1 + random.below(30).pow(2) as u32).collect();
    let bound: usize = lengths.iter().map(|length| *length as usize).sum::<usize>().div_ceil(4096);
    let decreasing = best_fit_decreasing(&lengths, 4096).unwrap();
    let stream = best_fit_stream(&lengths, 4096, 1024).unwrap();
    assert!(decreasing.len() <= bound + 1, "{} {bound}", decreasing.len());
    assert!(stream.len() as f64 <= bound as f64 * 1.01 + 1.0, "{} {bound}", stream.len());
    let ones = vec![1u32; 100_000];
    assert_eq!(best_fit_decreasing(&ones, 100_000).unwrap().len(), 1);
    assert_eq!(best_fit_stream(&ones, 100_000, 8).unwrap().bin(0).len(), 100_000);
    // Capacities beyond the three levels of 64-bit words that 262,144 would need.
    assert_eq!(best_fit_stream(&[900_000, 100_000, 5], 1_000_000, 8).unwrap().len(), 2);
}
