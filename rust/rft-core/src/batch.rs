//! Packs -> `input_ids`, `labels`, `position_ids`, `cu_seqlens`, `weights` in buffers of the caller.
//! **Labels shift here, nowhere else.**

use crate::error::{Error, Kind, Result};
use crate::plan::{Packing, Piece, Plan, padded};

/// A position without a label.
pub const NO_LABEL: i64 = -100;

/// Longest document of fill-up, a tile of the attention kernels: as one document, the fill-up of a pack would cost attention
/// with the square of its length, and an empty pack as much as the longest document there is.
pub const FILL_UP: usize = 128;

/// Where a micro-batch goes. All but `cu_seqlens` (one more) have the same length.
pub struct Buffers<'a> {
    /// Token ids.
    pub ids: &'a mut [i64],
    /// The next token of the document where it is trained on, else -100.
    pub labels: &'a mut [i64],
    /// Position in the document.
    pub positions: &'a mut [i64],
    /// Where documents start, and the end.
    pub cu_seqlens: &'a mut [i32],
    /// Loss factor of each label, 0 where there is none.
    pub weights: Option<&'a mut [f32]>,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filled {
    /// Length of the row.
    pub tokens: usize,
    /// Real tokens.
    pub num_tokens: u64,
    /// Positions with a label.
    pub num_label_tokens: u64,
    /// Sum of the labels' factors.
    pub label_weight: f64,
    /// Real tokens of each pack; 0 = a filler pack.
    pub pack_tokens: Vec<u32>,
    /// Length of every document, fill-up included.
    pub lengths: Vec<u32>,
}

/// Writes packs end to end, each filled up; `None` is a filler pack, which is all fill-up.
pub fn fill(plan: &Plan, packs: &[Option<usize>], pad_id: i64, buffers: &mut Buffers) -> Result<Filled> {
    let row = row_length(plan, packs);
    let tokens = row * packs.len();
    let mut filled = Filled { tokens, ..Filled::default() };
    if tokens > buffers.ids.len() {
        let problem = format!("a micro-batch of {tokens} tokens does not fit buffers of {}", buffers.ids.len());
        return Err(Error::new(Kind::Argument, "stream", problem));
    }
    let mut at = 0;
    for pack in packs {
        let start = at;
        for piece in pack.iter().flat_map(|pack| plan.pack(*pack)) {
            write_piece(plan, piece, at, buffers, &mut filled);
            at += piece.length as usize;
        }
        filled.pack_tokens.push((at - start) as u32);
        filled.num_tokens += (at - start) as u64;
        if at < start + row {
            write_fill_up(at..start + row, pad_id, buffers, &mut filled.lengths);
        }
        at = start + row;
    }
    let mut end = 0;
    buffers.cu_seqlens[0] = 0;
    for (to, length) in buffers.cu_seqlens[1..].iter_mut().zip(&filled.lengths) {
        end += *length as i32;
        *to = end;
    }
    Ok(filled)
}

/// Tokens that each pack of a micro-batch takes.
fn row_length(plan: &Plan, packs: &[Option<usize>]) -> usize {
    let seq_len = plan.options().seq_len as usize;
    match plan.options().packing {
        Packing::None => {
            let longest = packs.iter().flatten().map(|pack| plan.pack_tokens()[*pack]).max().unwrap_or(0);
            padded(longest as usize, seq_len)
        }
        _ => seq_len,
    }
}

fn write_piece(plan: &Plan, piece: Piece, at: usize, buffers: &mut Buffers, filled: &mut Filled) {
    let (store, length) = (plan.store(), piece.length as usize);
    let range = plan.tokens_of(piece);
    let ids = &mut buffers.ids[at..at + length];
    store.ids(range.clone()).copy_to(ids);
    count_up(&mut buffers.positions[at..at + length]);
    let labels = &mut buffers.labels[at..at + length];
    let targets = range.start + 1..range.end.max(range.start + 1);
    let labelled = write_labels(ids, labels, store.trained_runs(targets.clone()));
    filled.num_label_tokens += labelled;
    filled.lengths.push(piece.length);
    let factors = store.weights(targets);
    let factor = |index: usize| factors.map_or(1.0, |factors| f32::from_le_bytes(factors[index]));
    let weigh = |(index, label): (usize, &i64)| if *label == NO_LABEL { 0.0 } else { factor(index) };
    match &mut buffers.weights {
        None if factors.is_none() => filled.label_weight += labelled as f64,
        None => filled.label_weight += labels.iter().enumerate().map(weigh).map(f64::from).sum::<f64>(),
        Some(weights) => {
            for (to, label) in weights[at..at + length].iter_mut().zip(labels.iter().enumerate()) {
                *to = weigh(label);
                filled.label_weight += f64::from(*to);
            }
        }
    }
}

/// The id of the next token where it is trained on. `runs`: trained tokens, counted from the second on. Returns the number
/// of labels.
fn write_labels(ids: &[i64], labels: &mut [i64], runs: impl Iterator<Item = std::ops::Range<usize>>) -> u64 {
    let (mut at, mut count) = (0, 0);
    for run in runs {
        labels[at..run.start].fill(NO_LABEL);
        labels[run.clone()].copy_from_slice(&ids[run.start + 1..run.end + 1]);
        count += run.len() as u64;
        at = run.end;
    }
    labels[at..].fill(NO_LABEL);
    count
}

fn count_up(positions: &mut [i64]) {
    for (position, to) in positions.iter_mut().enumerate() {
        *to = position as i64;
    }
}

/// Fill-up is documents of at most [`FILL_UP`] tokens.
fn write_fill_up(range: std::ops::Range<usize>, pad_id: i64, buffers: &mut Buffers, lengths: &mut Vec<u32>) {
    buffers.ids[range.clone()].fill(pad_id);
    buffers.labels[range.clone()].fill(NO_LABEL);
    for document in buffers.positions[range.clone()].chunks_mut(FILL_UP) {
        count_up(document);
        lengths.push(document.len() as u32);
    }
    if let Some(weights) = &mut buffers.weights {
        weights[range].fill(0.0);
    }
}
