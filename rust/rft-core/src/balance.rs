//! Which rank takes which packs of a step, so that all of them finish at the same time. A step's gradient is a sum over its
//! packs, so who takes which changes nothing but the order of that sum.

/// Spread of the ranks' sums, in parts of their mean, below which exchanging packs is not worth the search.
const EVEN_ENOUGH: u64 = 1000;
/// Exchanges tried at most. Those that matter are the first few.
const EXCHANGES: usize = 200;

/// Deals packs of these costs to ranks, `each` to every one: rank r gets `dealt[r * each..(r + 1) * each]`, dearest first, so
/// that the ranks' micro-batches of one number cost about the same as well. Missing packs (`None`) come last.
///
/// Longest processing time first, then exchanges between the rank with the largest sum and others while they lower it.
/// The same costs give the same answer on every machine. O(n log n + n ranks), and per exchange O(n log each).
///
/// # Panics
/// More packs than places.
pub fn deal(costs: &[u64], ranks: usize, each: usize) -> Vec<Option<usize>> {
    assert!(costs.len() <= ranks * each, "{} packs for {ranks} x {each} places", costs.len());
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|pack| (std::cmp::Reverse(costs[*pack]), *pack));
    let mut hands: Vec<Hand> = (0..ranks).map(|_| Hand { sum: 0, packs: Vec::with_capacity(each) }).collect();
    for pack in order {
        let open = hands.iter_mut().filter(|hand| hand.packs.len() < each);
        if let Some(hand) = open.min_by_key(|hand| hand.sum) {
            hand.packs.push((costs[pack], Some(pack)));
            hand.sum += costs[pack];
        }
    }
    for hand in &mut hands {
        hand.packs.resize(each, (0, None));
    }
    let mean = costs.iter().sum::<u64>() / ranks.max(1) as u64;
    for _ in 0..EXCHANGES {
        if !exchange(&mut hands, mean) {
            break;
        }
    }
    hands.into_iter().flat_map(|hand| hand.packs).map(|(_, pack)| pack).collect()
}

/// A rank's packs by decreasing cost, and the sum of it.
struct Hand {
    sum: u64,
    packs: Vec<(u64, Option<usize>)>,
}

impl Hand {
    fn replace(&mut self, index: usize, new: (u64, Option<usize>)) {
        self.sum = self.sum + new.0 - self.packs[index].0;
        self.packs[index] = new;
        self.packs.sort_by_key(|(cost, pack)| (std::cmp::Reverse(*cost), pack.unwrap_or(usize::MAX)));
    }
}

/// Exchanges two packs so that the larger sum of both ranks becomes as small as it can; false where nothing gets better.
fn exchange(hands: &mut [Hand], mean: u64) -> bool {
    let Some(top) = (0..hands.len()).max_by_key(|rank| hands[*rank].sum) else { return false };
    let high = &hands[top];
    if (high.sum - mean) * EVEN_ENOUGH < mean {
        return false;
    }
    let mut best: Option<(u64, usize, usize, usize)> = None;
    for (rank, low) in hands.iter().enumerate().filter(|(rank, low)| *rank != top && low.sum < high.sum) {
        let gap = high.sum - low.sum;
        for (mine, (cost, _)) in high.packs.iter().enumerate() {
            // The exchange moves cost - theirs; half the gap would be best. Costs fall, so this is where they pass it.
            let middle = low.packs.partition_point(|(theirs, _)| *theirs + gap / 2 > *cost);
            for theirs in middle.saturating_sub(1)..low.packs.len().min(middle + 1) {
                let Some(moved) = cost.checked_sub(low.packs[theirs].0).filter(|moved| *moved > 0) else { continue };
                let larger = (high.sum - moved).max(low.sum + moved);
                if larger < high.sum && best.is_none_or(|(least, ..)| larger < least) {
                    best = Some((larger, rank, mine, theirs));
                }
            }
        }
    }
    let Some((_, rank, mine, theirs)) = best else { return false };
    let (given, taken) = (hands[top].packs[mine], hands[rank].packs[theirs]);
    hands[top].replace(mine, taken);
    hands[rank].replace(theirs, given);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Random;

    #[test]
    fn every_pack_is_dealt_once_and_ranks_get_equally_many() {
        let mut random = Random::new(1, 0, 0);
        for _ in 0..300 {
            let (ranks, each) = (1 + random.below(9), 1 + random.below(9));
            let count = random.below(ranks * each + 1);
            let costs: Vec<u64> = (0..count).map(|_| 1 + (random.next() % 1000).pow(2)).collect();
            let dealt = deal(&costs, ranks, each);
            assert_eq!(dealt.len(), ranks * each);
            let mut packs: Vec<usize> = dealt.iter().flatten().copied().collect();
            packs.sort_unstable();
            assert!(packs.into_iter().eq(0..count));
            for hand in dealt.chunks(each) {
                let costs: Vec<u64> = hand.iter().map(|pack| pack.map_or(0, |pack| costs[pack])).collect();
                assert!(costs.is_sorted_by(|a, b| a >= b));
            }
            assert_eq!(dealt, deal(&costs, ranks, each));
        }
    }

    #[test]
    fn sums_are_near_each_other() {
        let mut random = Random::new(2, 0, 0);
        let mut total = 0.0;
        for _ in 0..100 {
            let costs: Vec<u64> = (0..32).map(|_| (100 + random.next() % 900).pow(2)).collect();
            let sums: Vec<u64> =
                deal(&costs, 8, 4).chunks(4).map(|hand| hand.iter().flatten().map(|pack| costs[*pack]).sum()).collect();
            let mean = sums.iter().sum::<u64>() as f64 / 8.0;
            total += sums.iter().copied().max().unwrap_or(0) as f64 / mean;
        }
        // Longest first alone: 1.025.
        assert!(total / 100.0 < 1.015, "{}", total / 100.0);
    }
}
