//! `pack`, `deal`.

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use rft_core::balance;
use rft_core::pack::{MAX_CAPACITY, Misfit, arrange};
use rft_core::{Error, Kind};

use crate::error::to_py;

type Arrays<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<u32>>);

#[pyfunction]
#[pyo3(signature = (lengths, capacity, packing, seed=0, epoch=0, shuffle=true))]
pub fn pack<'py>(
    py: Python<'py>,
    lengths: PyReadonlyArray1<'py, u32>,
    capacity: u32,
    packing: &str,
    seed: u64,
    epoch: u64,
    shuffle: bool,
) -> PyResult<Arrays<'py>> {
    let lengths = lengths.as_slice()?;
    let packing = packing.parse().map_err(to_py)?;
    if capacity > MAX_CAPACITY {
        let problem = format!("bins of {capacity} tokens");
        return Err(to_py(Error::new(Kind::Argument, "capacity", problem).wanted(format!("at most {MAX_CAPACITY}"))));
    }
    let told = |Misfit { index, length }| {
        Error::new(Kind::Argument, format!("lengths[{index}]"), format!("{length} tokens"))
            .wanted(format!("1 to {capacity}"))
    };
    let packed = py
        .detach(|| arrange(lengths, capacity, packing, shuffle.then_some((seed, epoch))))
        .map_err(|misfit| to_py(told(misfit)))?;
    Ok((packed.items.into_pyarray(py), packed.offsets.into_pyarray(py)))
}

#[pyfunction]
pub fn deal(
    py: Python<'_>,
    costs: PyReadonlyArray1<'_, u64>,
    ranks: usize,
    each: usize,
) -> PyResult<Vec<Vec<Option<usize>>>> {
    let costs = costs.as_slice()?;
    if ranks == 0 || each == 0 || ranks.checked_mul(each).is_none_or(|places| costs.len() > places) {
        let problem = format!("{} packs for {ranks} ranks of {each}", costs.len());
        return Err(to_py(Error::new(Kind::Argument, "deal", problem)));
    }
    let dealt = py.detach(|| balance::deal(costs, ranks, each));
    Ok(dealt.chunks(each).map(<[_]>::to_vec).collect())
}
