//! Text and trained spans -> ids, a trained bit each, and weights.

use crate::chat::{Masked, Method, Span};
use crate::error::Error;
use crate::example::{Reason, RowError};
use crate::spec::{ControlPolicy, Spec};
use crate::tokenizer::{Encoded, Tokenizer, Unmarked};

/// A document, ready for the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// A trained bit for each.
    pub trained: Vec<bool>,
    /// A loss factor for each, unless all are 1.
    pub weights: Option<Vec<f32>>,
    /// Tokens that lie across the border of a trained span.
    pub straddling: u64,
    /// Whether the row spelled a control token.
    pub spelled: bool,
    /// How the spans were found; none for raw text.
    pub method: Option<Method>,
}

type RowResult<T> = std::result::Result<T, RowError>;

/// A row with nothing to learn in it.
pub fn untrained(problem: &str) -> RowError {
    RowError::new(Reason::NoTrainedToken, "", problem)
}

fn tokenizer_error(error: Error) -> RowError {
    RowError::bad("", error.problem, "text that this tokenizer can write")
        .remedy("fix the row, set data.control_tokens = \"allow\", or skip bad rows with data.on_error = \"skip\"")
}

/// Raw text: begin of text where the tokenizer adds it, the prompt, the text, end of text. The prompt is not trained
/// on; both sides are tokenised for themselves, so that no token lies across the border.
pub fn of_raw(tokenizer: &Tokenizer, spec: &Spec, prompt: Option<&str>, text: &str, weight: f32) -> RowResult<Tokens> {
    if prompt.is_none() && text.trim().is_empty() {
        return Err(RowError::new(Reason::Empty, "text", "no text"));
    }
    if weight == 0.0 {
        return Err(untrained("its loss_weight is 0"));
    }
    let allow = spec.control_tokens == ControlPolicy::Allow;
    let encode = |text: &str| {
        if allow { tokenizer.encode(text).map(|encoded| encoded.ids) } else { tokenizer.encode_text(text) }
    };
    let (bos, eos) = (spec.tokenizer.bos_id.filter(|_| spec.tokenizer.add_bos), spec.tokenizer.eos_id);
    let mut ids: Vec<u32> = Vec::new();
    if let Some(prompt) = prompt {
        ids = encode(prompt).map_err(tokenizer_error)?;
    }
    let mut read = ids.len();
    ids.extend(encode(text).map_err(tokenizer_error)?);
    // Where control tokens are allowed, the row may bring its own.
    if let Some(bos) = bos
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
        read += usize::from(prompt.is_some());
    }
    if ids.last() != Some(&eos) {
        ids.push(eos);
    }
    let trained = (0..ids.len()).map(|index| index >= read).collect();
    let spelled = !allow && [prompt.unwrap_or_default(), text].iter().any(|text| tokenizer.control().is_spelled(text));
    let weights = (weight != 1.0).then(|| vec![weight; ids.len()]);
    Ok(Tokens { ids, trained, weights, straddling: 0, spelled, method: None })
}

/// A rendered chat, exactly as the template wrote it. A token that overlaps a trained span is trained on.
pub fn of_chat(tokenizer: &Tokenizer, masked: &Masked) -> RowResult<Tokens> {
    let clean = Unmarked::new(&masked.text);
    let encoded = tokenizer.encode_marked(&masked.text, &clean).map_err(tokenizer_error)?;
    let spans: Vec<Span> = masked
        .spans
        .iter()
        .map(|span| Span { start: clean.position(span.start), end: clean.position(span.end), ..*span })
        .collect();
    let tokens = mask(encoded, &spans, masked.method, tokenizer);
    if tokens.trained.iter().any(|bit| *bit) { Ok(tokens) } else { Err(untrained("no token of it is trained on")) }
}

fn mask(encoded: Encoded, spans: &[Span], method: Method, tokenizer: &Tokenizer) -> Tokens {
    let Encoded { ids, offsets } = encoded;
    let mut trained = vec![false; ids.len()];
    let weighted = spans.iter().any(|span| span.weight != 1.0);
    let mut weights = weighted.then(|| vec![1.0; ids.len()]);
    let (mut straddling, mut next) = (0, 0);
    for (index, &(start, end)) in offsets.iter().enumerate() {
        // Token starts do not decrease, so spans that end before one are done with.
        while next < spans.len() && spans[next].end <= start {
            next += 1;
        }
        let Some(span) = spans.get(next) else { break };
        let overlaps = if start == end { span.start <= start } else { span.start < end };
        if !overlaps {
            continue;
        }
        trained[index] = true;
        if let Some(weights) = &mut weights {
            weights[index] = span.weight;
        }
        let inside = span.start <= start && end <= span.end;
        let goes_on = spans.get(next + 1).is_some_and(|after| after.start == span.end && end <= after.end);
        straddling += u64::from(!inside && !goes_on && !tokenizer.control().is_control(ids[index]));
    }
    Tokens { ids, trained, weights, straddling, spelled: false, method: Some(method) }
}
