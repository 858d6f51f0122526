//! `Template`.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use rft_core::{Error, Kind, template};

use crate::error::to_py;

/// Character offsets as byte offsets; none where they lie outside the text.
pub fn byte_spans(text: &str, spans: &[(usize, usize)]) -> Option<Vec<(usize, usize)>> {
    if text.is_ascii() {
        return spans.iter().all(|span| span.0 <= span.1 && span.1 <= text.len()).then(|| spans.to_vec());
    }
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    spans.iter().map(|&(a, b)| if a <= b { Some((*starts.get(a)?, *starts.get(b)?)) } else { None }).collect()
}

/// Byte offsets as character offsets.
pub fn char_spans(text: &str, spans: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let chars = |at: usize| text[..at].chars().count();
    spans.iter().map(|&(start, end)| (chars(start), chars(end))).collect()
}

#[pyclass(frozen, module = "rft._native")]
pub struct Template(template::Template);

#[pymethods]
impl Template {
    #[new]
    fn new(source: &str, special: BTreeMap<String, Option<String>>) -> PyResult<Self> {
        template::Template::new(source, &special).map(Template).map_err(to_py)
    }

    /// Whether the template says itself what is generated.
    #[getter]
    fn tagged(&self) -> bool {
        self.0.tagged()
    }

    #[pyo3(signature = (conversation, add_generation_prompt=false))]
    fn render(
        &self,
        py: Python<'_>,
        conversation: &str,
        add_generation_prompt: bool,
    ) -> PyResult<(String, Vec<(usize, usize)>)> {
        py.detach(|| {
            let failed = |problem: String| Error::new(Kind::Template, "chat template", problem);
            let conversation =
                serde_json::from_str(conversation).map_err(|e| failed(format!("the conversation is no JSON: {e}")))?;
            let rendered = self.0.render_json(&conversation, add_generation_prompt).map_err(failed)?;
            let spans = char_spans(&rendered.text, &rendered.spans);
            Ok((rendered.text, spans))
        })
        .map_err(to_py)
    }
}
