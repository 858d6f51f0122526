//! The epoch's order: a permutation that is a function of its seed alone, the same on every machine.

/// SplitMix64: small, fast, and fixed for ever, because plans depend on it.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for one use (`salt`) of a seed in an epoch.
    pub fn new(seed: u64, epoch: u64, salt: u64) -> Random {
        let mut random = Random(seed);
        for part in [epoch, salt] {
            random.0 = random.next().wrapping_add(part.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        random
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n` (n > 0).
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Rounds of the network.
const ROUNDS: usize = 6;
/// Rounds for up to [`FEW`] items: with 6, some orders of 5 items come up twice as often as others.
const ROUNDS_FOR_FEW: usize = 32;
const FEW: u32 = 1024;
/// Places computed at once, in vectors.
const LANES: usize = 256;

/// A permutation of 0..n that is computed, not stored: an unbalanced Feistel network over rows x columns, both about the
/// square root of n, walked on from the few places (fewer than the number of rows) that lie behind n.
#[derive(Clone, Debug)]
pub struct Permutation {
    len: u32,
    rows: u32,
    columns: u32,
    keys: [[u32; 2]; ROUNDS_FOR_FEW / 2],
}

impl Permutation {
    /// The permutation of `len` items for one use (`salt`) of a seed in an epoch, as in [`Random::new`].
    pub fn new(len: u32, seed: u64, epoch: u64, salt: u64) -> Permutation {
        let mut random = Random::new(seed, epoch, salt);
        let rows = (f64::from(len).sqrt().ceil() as u32).max(1);
        let columns = len.div_ceil(rows).max(1);
        let mut key = || (random.next() >> 32) as u32;
        Permutation { len, rows, columns, keys: std::array::from_fn(|_| [key(), key()]) }
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which item comes at a place.
    ///
    /// # Panics
    /// `place` behind the end.
    pub fn at(&self, place: u32) -> u32 {
        let mut item = [0];
        self.fill(place, &mut item);
        item[0]
    }

    /// The items from a place on, as many as `items` holds. A few nanoseconds each.
    ///
    /// # Panics
    /// Places behind the end.
    pub fn fill(&self, place: u32, items: &mut [u32]) {
        assert!(place as usize + items.len() <= self.len(), "places behind the end of a permutation");
        let (mut row, mut column) = (place / self.columns, place % self.columns);
        for items in items.chunks_mut(LANES) {
            let (mut rows, mut columns) = ([0; LANES], [0; LANES]);
            for lane in 0..items.len() {
                (rows[lane], columns[lane]) = (row, column);
                column += 1;
                if column == self.columns {
                    (row, column) = (row + 1, 0);
                }
            }
            self.turn(&mut rows, &mut columns, items.len());
            for (item, (row, column)) in items.iter_mut().zip(rows.into_iter().zip(columns)) {
                *item = row * self.columns + column;
                // Ends: the place we came from lies below `len`, and the network is a bijection.
                while *item >= self.len {
                    let (mut row, mut column) = ([*item / self.columns], [*item % self.columns]);
                    self.turn(&mut row, &mut column, 1);
                    *item = row[0] * self.columns + column[0];
                }
            }
        }
    }

    /// All of it, as an array.
    pub fn to_vec(&self) -> Vec<u32> {
        let mut items = vec![0; self.len()];
        self.fill(0, &mut items);
        items
    }

    /// The network, over the first `count` lanes.
    fn turn(&self, rows: &mut [u32], columns: &mut [u32], count: usize) {
        let (rows, columns) = (&mut rows[..count], &mut columns[..count]);
        let keys = &self.keys[..if self.len <= FEW { ROUNDS_FOR_FEW } else { ROUNDS } / 2];
        for [first, second] in keys {
            add_hash(rows, columns, *first, self.rows);
            add_hash(columns, rows, *second, self.columns);
        }
    }
}

/// Each value becomes (value + a hash of its other) modulo `size`, which is at most 65,536.
fn add_hash(values: &mut [u32], others: &[u32], key: u32, size: u32) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide(values: &mut [u32], others: &[u32], key: u32, size: u32) {
            add_hash_plain(values, others, key, size);
        }
        // SAFETY: the processor has AVX2.
        return unsafe { wide(values, others, key, size) };
    }
    add_hash_plain(values, others, key, size);
}

#[inline(always)]
fn add_hash_plain(values: &mut [u32], others: &[u32], key: u32, size: u32) {
    for (value, other) in values.iter_mut().zip(others) {
        let hash = (other ^ key).wrapping_mul(0x9e37_79b1);
        let hash = (hash ^ (hash >> 15)).wrapping_mul(0x85eb_ca6b);
        // 16 bits of the hash scaled to the size: no multiplication wider than a lane.
        let sum = *value + (((hash >> 16) * size) >> 16);
        *value = sum.min(sum.wrapping_sub(size));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(len: u32, seeds: u64) -> impl Iterator<Item = Vec<u32>> {
        (0..seeds).map(move |seed| Permutation::new(len, seed, 0, 0).to_vec())
    }

    #[test]
    fn a_permutation_holds_every_item_once_and_follows_seed_epoch_and_use() {
        for len in (0..70).chain([100, 1000, 4095, 4096, 4097, 65_537]) {
            let permutation = Permutation::new(len, 1, 2, 3);
            let mut items = permutation.to_vec();
            assert!(items.iter().copied().eq((0..len).map(|place| permutation.at(place))));
            let mut tail = vec![0; len as usize - len as usize / 3];
            permutation.fill(len / 3, &mut tail);
            assert_eq!(tail, items[len as usize / 3..]);
            items.sort_unstable();
            assert!(items.into_iter().eq(0..len), "{len}");
        }
        let first = |seed, epoch, salt| Permutation::new(1000, seed, epoch, salt).to_vec();
        let all = [first(1, 0, 0), first(2, 0, 0), first(1, 1, 0), first(1, 0, 1)];
        for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)] {
            let same = all[a].iter().zip(&all[b]).filter(|(x, y)| x == y).count();
            assert!(same < 12, "{a} {b}: {same} places agree, 1 expected");
        }
        assert_eq!(first(1, 0, 0), all[0]);
    }

    /// Chi-square of counts that should all be equal, in standard deviations from what chance gives.
    fn surprise(counts: &[u32]) -> f64 {
        let mean = counts.iter().map(|count| f64::from(*count)).sum::<f64>() / counts.len() as f64;
        let chi: f64 = counts.iter().map(|count| (f64::from(*count) - mean).powi(2) / mean).sum();
        let free = (counts.len() - 1) as f64;
        (chi - free) / (2.0 * free).sqrt()
    }

    #[test]
    fn every_order_of_few_items_is_as_likely_as_any_other() {
        for (len, orders_of) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
            let mut counts = std::collections::HashMap::new();
            orders(len, 30_000).for_each(|order| *counts.entry(order).or_insert(0u32) += 1);
            assert_eq!(counts.len(), orders_of);
            let surprise = surprise(&counts.into_values().collect::<Vec<_>>());
            assert!(surprise < 4.0, "{len} items: {surprise}");
        }
    }

    #[test]
    fn every_item_is_as_likely_at_every_place_and_before_every_other() {
        let len = 23;
        let (mut places, mut pairs) = (vec![0u32; len * len], vec![0u32; len * len]);
        for order in orders(len as u32, 20_000) {
            for (place, item) in order.iter().enumerate() {
                places[place * len + *item as usize] += 1;
            }
            for pair in order.windows(2) {
                pairs[pair[0] as usize * len + pair[1] as usize] += 1;
            }
        }
        let pairs: Vec<u32> =
            pairs.into_iter().enumerate().filter(|(at, _)| at / len != at % len).map(|(_, count)| count).collect();
        assert!(surprise(&places).abs() < 4.0, "{}", surprise(&places));
        assert!(surprise(&pairs).abs() < 4.0, "{}", surprise(&pairs));
    }

    #[test]
    fn runs_of_a_long_order_mix_the_whole_set() {
        // Means of 64 consecutive items of 100,000: variance as of random draws.
        let ratios: Vec<f64> = orders(100_000, 20)
            .map(|order| {
                let means = order.chunks_exact(64).map(|run| run.iter().map(|x| f64::from(*x)).sum::<f64>() / 64.0);
                let spread = means.clone().map(|mean| (mean - 49_999.5).powi(2)).sum::<f64>() / means.count() as f64;
                spread / (1e10 / 12.0 / 64.0)
            })
            .collect();
        let mean = ratios.iter().sum::<f64>() / 20.0;
        // 20 x 1562 batches: one standard deviation of the mean ratio is 0.008.
        assert!((mean - 1.0).abs() < 0.032, "{mean}");
    }

    #[test]
    fn the_generators_never_change() {
        // Plans of sets on disk depend on these numbers.
        let mut random = Random::new(42, 3, 1);
        let drawn: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(drawn, EXPECTED);
        let mut order = [0; 4];
        Permutation::new(1_000_000, 42, 3, 1).fill(0, &mut order);
        assert_eq!(order, EXPECTED_ORDER);
    }

    const EXPECTED: [u64; 3] = [15_631_447_266_810_971_941, 6_461_203_535_525_486_704, 12_818_962_036_954_990_668];
    const EXPECTED_ORDER: [u32; 4] = [198_481, 70_298, 604_255, 962_871];
}
