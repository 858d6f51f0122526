//! Packs -> `input_ids`, `labels`, `position_ids`, `cu_seqlens`, `weights` in buffers of the caller.
//! **Labels shift here, nowhere else.**

use crate::error::{Error, Kind, Result};
use crate::plan::{Packing, Piece, Plan, padded};

/// A position without a label.
pub const NO_LABEL: i64 = -100;

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
    /// Longest document, fill-up included.
    pub max_length: u32,
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
            write_fill_up(at..start + row, pad_id, buffers);
            filled.lengths.push((start + row - at) as u32);
        }
        at = start + row;
    }
    let mut end = 0;
    buffers.cu_seqlens[0] = 0;
    for (to, length) in buffers.cu_seqlens[1..].iter_mut().zip(&filled.lengths) {
        end += *length as i32;
        *to = end;
    }
    filled.max_length = filled.lengths.iter().copied().max().unwrap_or(0);
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
    for (position, to) in buffers.positions[at..at + length].iter_mut().enumerate() {
        *to = position as i64;
    }
    let mut labelled = 0u64;
    for (index, label) in buffers.labels[at..at + length].iter_mut().enumerate() {
        let target = index + 1;
        let trained = target < length && store.is_trained(range.start + target);
        *label = if trained { ids[target] } else { NO_LABEL };
        labelled += u64::from(trained);
    }
    filled.num_label_tokens += labelled;
    filled.lengths.push(piece.length);
    let weigh = |label: i64, index: usize| if label == NO_LABEL { 0.0 } else { store.weight(range.start + index + 1) };
    match (&mut buffers.weights, store.has_weights()) {
        (None, false) => filled.label_weight += labelled as f64,
        (None, true) => {
            let labels = buffers.labels[at..at + length].iter().enumerate();
            filled.label_weight += labels.map(|(index, label)| f64::from(weigh(*label, index))).sum::<f64>();
        }
        (Some(weights), _) => {
            for (index, to) in weights[at..at + length].iter_mut().enumerate() {
                *to = weigh(buffers.labels[at + index], index);
                filled.label_weight += f64::from(*to);
            }
        }
    }
}

fn write_fill_up(range: std::ops::Range<usize>, pad_id: i64, buffers: &mut Buffers) {
    buffers.ids[range.clone()].fill(pad_id);
    buffers.labels[range.clone()].fill(NO_LABEL);
    for (position, to) in buffers.positions[range.clone()].iter_mut().enumerate() {
        *to = position as i64;
    }
    if let Some(weights) = &mut buffers.weights {
        weights[range].fill(0.0);
    }
}
