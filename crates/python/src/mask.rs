//! `counterpoint.Mask`: a value of the mask crate with the argument forms of Python.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use counterpoint_mask::{
    AttnSlice, Documents, Mask as Native, MaskError, MaskType, PictureStyle, Range, Window,
};
use counterpoint_report::MaskDrawing;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};

use crate::error::{engine, raise};
use crate::integers::{described, limit, list, listed, size, sizes};
use crate::numbered::Numbers;

/// Which query row sees which key column. A value: hashable, equal where its slices are, pickled as JSON.
///
/// >>> import counterpoint as cp
/// >>> mask = cp.Mask("varlen-causal:lengths=3,5")
/// >>> mask
/// Mask(seqlen_q=8, seqlen_k=8, slices=2, area=21)
/// >>> (3, 2) in mask, (4, 3) in mask
/// (False, True)
#[pyclass(frozen, module = "counterpoint", name = "Mask", eq, hash)]
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    pub(crate) native: Arc<Native>,
    /// Of its contents. Every call that keeps plans by their masks asks for it.
    hash: OnceLock<u64>,
    number: OnceLock<u64>,
}

static NUMBERS: Numbers<Native> = Numbers::new();

impl Mask {
    pub(crate) fn of(native: Arc<Native>) -> Self {
        Self { native, hash: OnceLock::new(), number: OnceLock::new() }
    }
}

impl PartialEq for Mask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.native, &other.native) || self.native == other.native
    }
}

impl Eq for Mask {}

impl Hash for Mask {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let of_contents = || {
            let mut hasher = DefaultHasher::new();
            self.native.hash(&mut hasher);
            hasher.finish()
        };
        state.write_u64(*self.hash.get_or_init(of_contents));
    }
}

fn made(py: Python<'_>, make: impl FnOnce() -> Result<Native, MaskError> + Send) -> PyResult<Mask> {
    engine(py, make).map(|native| Mask::of(Arc::new(native)))
}

/// Query rows, key columns, type.
type Slice = ((usize, usize), (usize, usize), &'static str);

/// A refusal of ours, as the engine's.
fn refuse<T>(py: Python<'_>, message: impl AsRef<str>) -> PyResult<T> {
    Err(raise(py, "MaskError", message.as_ref(), &[]))
}

#[pymethods]
impl Mask {
    /// From a builder expression ("varlen-causal:lengths=100,300"), a path to a JSON file, or JSON itself.
    #[new]
    fn new(expression: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = expression.py();
        let path = py.import("os")?.getattr("fspath")?.call1((expression,));
        let text: String = path.and_then(|text| text.extract()).map_err(|_| {
            let found = described(expression);
            PyTypeError::new_err(format!(
                "expression must be text such as \"causal:4096\", a path or JSON, not {found}"
            ))
        })?;
        if text.trim_start().starts_with('{') {
            return made(py, || Native::from_json(&text));
        }
        made(py, || Native::parse(&text, &counterpoint_console::mask_argument::text_of))
    }

    /// Every one of `s` queries sees every one of `keys` keys, which are as many if not given.
    #[staticmethod]
    #[pyo3(signature = (s, keys=None))]
    fn full(py: Python<'_>, s: i64, keys: Option<i64>) -> PyResult<Self> {
        let (queries, keys) = (size(py, "s", s)?, size(py, "keys", keys.unwrap_or(s))?);
        made(py, || Native::cross_full(queries, keys))
    }

    /// A token sees itself and what is before it; with `keys`, the last query sees all keys.
    #[staticmethod]
    #[pyo3(signature = (s, keys=None))]
    fn causal(py: Python<'_>, s: i64, keys: Option<i64>) -> PyResult<Self> {
        let (queries, keys) = (size(py, "s", s)?, size(py, "keys", keys.unwrap_or(s))?);
        made(py, || Native::cross_causal(queries, keys))
    }

    /// Packed documents by their cumulative starts, as flash attention takes them: each sees itself alone.
    ///
    /// `window` is (left, right), -1 for no limit; `causal` makes right 0. `global_tokens` tokens at the front of a document stay in
    /// sight of a window that has left them.
    #[staticmethod]
    #[pyo3(
        signature = (cu_seqlens, cu_seqlens_k=None, *, causal=false, window=(Some(-1), Some(-1)), global_tokens=0),
        text_signature = "(cu_seqlens, cu_seqlens_k=None, *, causal=False, window=(-1, -1), global_tokens=0)"
    )]
    fn varlen(
        cu_seqlens: &Bound<'_, PyAny>,
        cu_seqlens_k: Option<&Bound<'_, PyAny>>,
        causal: bool,
        window: (Option<i64>, Option<i64>),
        global_tokens: i64,
    ) -> PyResult<Self> {
        let py = cu_seqlens.py();
        let starts = sizes("cu_seqlens", cu_seqlens)?;
        let key_starts = match cu_seqlens_k {
            Some(value) => sizes("cu_seqlens_k", value)?,
            None => starts.clone(),
        };
        let (left, right) = (limit(py, "window[0]", window.0)?, limit(py, "window[1]", window.1)?);
        let window = Window { left, right, global: size(py, "global_tokens", global_tokens)? };
        made(py, || {
            let (queries, keys) = (Documents::from_starts(starts)?, Documents::from_starts(key_starts)?);
            match (window.left, window.right, causal) {
                (None, None, false) => Native::cross_full(queries, keys),
                (None, None | Some(0), true) => Native::cross_causal(queries, keys),
                (_, _, true) => {
                    Native::cross_sliding_window(queries, keys, Window { right: Some(0), ..window })
                }
                _ => Native::cross_sliding_window(queries, keys, window),
            }
        })
    }

    /// Token `i` sees `left` tokens before itself and `right` after, -1 or None for no limit, and the first `global_tokens`.
    #[staticmethod]
    #[pyo3(signature = (s, left, right, global_tokens=0))]
    fn sliding_window(
        py: Python<'_>,
        s: i64,
        left: Option<i64>,
        right: Option<i64>,
        global_tokens: i64,
    ) -> PyResult<Self> {
        let seqlen = size(py, "s", s)?;
        let (left, right) = (limit(py, "left", left)?, limit(py, "right", right)?);
        let global = size(py, "global_tokens", global_tokens)?;
        made(py, || Native::sliding_window(seqlen, Window { left, right, global }))
    }

    /// A tree of packed pieces, for rollouts that share prefixes: a token sees its own piece up to itself and every piece on the way
    /// to the root. `parents[i]` is the piece that piece `i` continues, -1 or None for a root; `lengths` are in tokens.
    #[staticmethod]
    fn prefix_tree(parents: &Bound<'_, PyAny>, lengths: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = parents.py();
        let wanted = "a list of whole numbers, -1 for a root";
        let parents: Vec<Option<i64>> = list("parents", wanted, parents)?;
        let mut checked = Vec::with_capacity(parents.len());
        for (piece, parent) in parents.into_iter().enumerate() {
            checked.push(match parent {
                None | Some(-1) => None,
                Some(parent) => Some(size(py, &format!("parents[{piece}]"), parent)?),
            });
        }
        let lengths = sizes("lengths", lengths)?;
        if lengths.len() != checked.len() {
            let (found, pieces) = (checked.len(), lengths.len());
            return refuse(
                py,
                format!("{found} parents for {pieces} lengths; give one of each for every piece"),
            );
        }
        made(py, || Native::prefix_tree(&checked, &Documents::from_lengths(lengths)?))
    }

    /// A grid of blocks: `blocks[i][j]` says whether the queries of block row `i` see the keys of block column `j`. `block` is a
    /// number of tokens, or (of queries, of keys). The sequences fill the grid if their lengths are not given.
    #[staticmethod]
    #[pyo3(signature = (blocks, *, block, seqlen_q=None, seqlen_k=None))]
    fn block_sparse(
        blocks: &Bound<'_, PyAny>,
        block: &Bound<'_, PyAny>,
        seqlen_q: Option<i64>,
        seqlen_k: Option<i64>,
    ) -> PyResult<Self> {
        let py = blocks.py();
        let (rows, cols, seen) = dense("blocks", blocks)?;
        let (block_q, block_k) = match block.extract::<(i64, i64)>() {
            Ok(pair) => pair,
            Err(_) => block.extract::<i64>().map(|block| (block, block)).map_err(|_| {
                let found = described(block);
                PyTypeError::new_err(format!(
                    "block must be a number of tokens, or one for queries and one for keys, not {found}"
                ))
            })?,
        };
        let (block_q, block_k) = (size(py, "block", block_q)?, size(py, "block", block_k)?);
        let length = |name: &str, given: Option<i64>, blocks: usize, block: usize| match given {
            Some(given) => size(py, name, given),
            None => Ok(blocks.saturating_mul(block)),
        };
        let seqlen_q = length("seqlen_q", seqlen_q, rows, block_q)?;
        let seqlen_k = length("seqlen_k", seqlen_k, cols, block_k)?;
        let pairs: Vec<(usize, usize)> = (0..rows)
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .filter(|(row, col)| seen[row * cols + col] != 0)
            .collect();
        made(py, || Native::block_sparse(seqlen_q, seqlen_k, block_q, block_k, &pairs))
    }

    /// Slices, as kernels that take ranges have them: `types` are numbers (0 full, 1 causal, 2 inverse causal, 3 both) or names, or one for
    /// all. Overlapping slices are an error, or count once with `overlapping="union"`.
    #[staticmethod]
    #[pyo3(signature = (q_ranges, k_ranges, types, *, seqlen_q, seqlen_k, overlapping="error"))]
    fn from_slices(
        q_ranges: &Bound<'_, PyAny>,
        k_ranges: &Bound<'_, PyAny>,
        types: &Bound<'_, PyAny>,
        seqlen_q: i64,
        seqlen_k: i64,
        overlapping: &str,
    ) -> PyResult<Self> {
        let py = q_ranges.py();
        let (q, k) = (ranges("q_ranges", q_ranges)?, ranges("k_ranges", k_ranges)?);
        let types = mask_types(types, q.len())?;
        if q.len() != k.len() || q.len() != types.len() {
            let (queries, keys, types) = (q.len(), k.len(), types.len());
            let message =
                format!("{queries} q_ranges, {keys} k_ranges and {types} types; a slice has one of each");
            return refuse(py, message);
        }
        let slices: Vec<AttnSlice> =
            q.into_iter().zip(k).zip(types).map(|((q, k), kind)| AttnSlice::new(q, k, kind)).collect();
        let (seqlen_q, seqlen_k) = (size(py, "seqlen_q", seqlen_q)?, size(py, "seqlen_k", seqlen_k)?);
        match overlapping {
            "error" => made(py, || Native::new(seqlen_q, seqlen_k, slices)),
            "union" => made(py, || Native::union(seqlen_q, seqlen_k, &slices)),
            _ => refuse(py, format!("overlapping is {overlapping:?}; it must be \"error\" or \"union\"")),
        }
    }

    /// From an array of two axes, true where a query (row) sees a key (column). Edges that are straight or diagonal are found.
    #[staticmethod]
    fn from_dense(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (rows, cols, seen) = dense("array", array)?;
        made(array.py(), || Native::from_dense(rows, cols, |row, col| seen[row * cols + col] != 0))
    }

    /// From the number of its document for every token; a negative number is padding, which sees nothing. Causal inside a document,
    /// unless `causal=False`.
    #[staticmethod]
    #[pyo3(signature = (ids, *, causal=true))]
    fn from_document_ids(ids: &Bound<'_, PyAny>, causal: bool) -> PyResult<Self> {
        let ids = row("ids", ids)?;
        made(ids.0, || Native::from_document_ids(&ids.1, causal))
    }

    /// From positions that begin again at 0 with every document, as transformers marks packed sequences. Causal inside a document,
    /// unless `causal=False`.
    #[staticmethod]
    #[pyo3(signature = (position_ids, *, causal=true))]
    fn from_position_ids(position_ids: &Bound<'_, PyAny>, causal: bool) -> PyResult<Self> {
        let (py, positions) = row("position_ids", position_ids)?;
        let mut lengths: Vec<usize> = Vec::new();
        let mut expected = 0;
        for (token, &position) in positions.iter().enumerate() {
            match (position, lengths.last_mut()) {
                (0, _) => lengths.push(1),
                (_, Some(length)) if position == expected => *length += 1,
                _ => {
                    let message = format!(
                        "position_ids[{token}] is {position}; it must be {expected}, or 0 where a document begins"
                    );
                    return refuse(py, message);
                }
            }
            expected = position + 1;
        }
        made(py, || {
            let documents = Documents::from_lengths(lengths)?;
            if causal { Native::causal(documents) } else { Native::full(documents) }
        })
    }

    /// The same pairs where rows lie in another order: `q_order` has the (start, end) of ranges of queries as they follow each other
    /// then, each row once; `k_order` those of keys, which is `q_order` if it is not given.
    #[pyo3(signature = (q_order, k_order=None))]
    fn rearranged(&self, q_order: &Bound<'_, PyAny>, k_order: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let queries = ranges("q_order", q_order)?;
        let keys = k_order.map_or_else(|| Ok(queries.clone()), |order| ranges("k_order", order))?;
        made(q_order.py(), || self.native.rearranged(&queries, &keys))
    }

    /// By which compiled operators know it, as long as it lives.
    #[getter]
    fn number(&self) -> u64 {
        let number = *self.number.get_or_init(|| NUMBERS.next());
        NUMBERS.keep(number, &self.native);
        number
    }

    /// The mask that a compiled operator was given as a number; `None` where it is gone.
    #[staticmethod]
    fn of_number(number: u64) -> Option<Self> {
        NUMBERS.find(number).map(Self::of)
    }

    /// Query rows.
    #[getter]
    fn seqlen_q(&self) -> usize {
        self.native.seqlen_q()
    }

    /// Key columns.
    #[getter]
    fn seqlen_k(&self) -> usize {
        self.native.seqlen_k()
    }

    /// The slices as ((q start, q end), (k start, k end), type).
    #[getter]
    fn slices(&self) -> Vec<Slice> {
        let slice = |slice: &AttnSlice| {
            let (q, k) = (slice.q_range, slice.k_range);
            ((q.start, q.end), (k.start, k.end), slice.mask_type.name())
        };
        self.native.slices().iter().map(slice).collect()
    }

    /// Number of pairs that are seen.
    #[getter]
    fn area(&self) -> u64 {
        self.native.area()
    }

    /// Whether query `row` sees key `column`: `(row, column) in mask`.
    fn __contains__(&self, pair: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (row, col): (i64, i64) = pair.extract().map_err(|_| {
            PyTypeError::new_err(format!("ask for a pair (row, column), not {}", described(pair)))
        })?;
        Ok(row >= 0 && col >= 0 && self.native.contains(row as usize, col as usize))
    }

    /// A torch tensor of booleans, [seqlen_q, seqlen_k]; needs PyTorch.
    fn to_dense<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        const MOST: u64 = 1 << 32;
        let (rows, cols) = (self.native.seqlen_q(), self.native.seqlen_k());
        let pairs = rows as u64 * cols as u64;
        if pairs > MOST {
            return refuse(
                py,
                format!("a dense mask of {rows} x {cols} would take {pairs} bytes; at most {MOST} are made"),
            );
        }
        let seen = engine::<_, MaskError>(py, || Ok(self.native.rasterise()))?;
        let seen: Vec<u8> = seen.into_iter().map(u8::from).collect();
        let dense = py.import("counterpoint._arrays")?.getattr("dense")?;
        dense.call1((PyBytes::new(py, &seen), rows, cols))
    }

    /// The mask as JSON, which `Mask` takes.
    fn to_json(&self) -> String {
        self.native.to_json()
    }

    /// A picture of characters.
    #[pyo3(signature = (width=64, height=32))]
    fn picture(&self, py: Python<'_>, width: usize, height: usize) -> PyResult<String> {
        const MOST: u64 = 1 << 24;
        // No part is smaller than a token.
        let [width, height] = [width.clamp(1, self.seqlen_k()), height.clamp(1, self.seqlen_q())];
        if width as u64 * height as u64 > MOST {
            return refuse(
                py,
                format!("a picture of {width} x {height} characters is too large; at most {MOST} are drawn"),
            );
        }
        engine::<_, MaskError>(py, || Ok(self.native.picture(width, height, PictureStyle::Blocks)))
    }

    /// A drawing as SVG text.
    #[pyo3(signature = (*, title="Attention mask"))]
    fn svg(&self, title: &str) -> String {
        MaskDrawing { title, mask: &self.native, plan: None }.render()
    }

    fn _repr_html_(&self) -> String {
        // Notebooks keep every output.
        let title = "Attention mask";
        MaskDrawing { title, mask: &self.native, plan: None }.render_small()
    }

    #[pyo3(signature = (include=None, exclude=None))]
    fn _repr_mimebundle_<'py>(
        &self,
        py: Python<'py>,
        include: Option<&Bound<'py, PyAny>>,
        exclude: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let _ = (include, exclude);
        let bundle = PyDict::new(py);
        bundle.set_item("text/html", self._repr_html_())?;
        bundle.set_item("text/plain", format!("{}\n{}", self.__repr__(), self.picture(py, 64, 32)?))?;
        Ok(bundle)
    }

    fn __repr__(&self) -> String {
        let (q, k) = (self.native.seqlen_q(), self.native.seqlen_k());
        let (slices, area) = (self.native.slices().len(), self.native.area());
        format!("Mask(seqlen_q={q}, seqlen_k={k}, slices={slices}, area={area})")
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, Bound<'py, PyTuple>) {
        let arguments = PyTuple::new(py, [self.native.to_json()]);
        (py.get_type::<Self>(), arguments.unwrap_or_else(|_| PyTuple::empty(py)))
    }
}

/// An array of two axes as (rows, columns, one byte an element, row by row).
fn dense(name: &str, array: &Bound<'_, PyAny>) -> PyResult<(usize, usize, Vec<u8>)> {
    let arrays = array.py().import("counterpoint._arrays")?;
    arrays.getattr("booleans")?.call1((name, array))?.extract()
}

/// Whole numbers of one sequence: one axis, or two of which the first has length 1.
fn row<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<(Python<'py>, Vec<i64>)> {
    let wanted = "whole numbers, one for each token of one sequence ([tokens] or [1, tokens])";
    let nested: PyResult<Vec<Vec<i64>>> = list(name, wanted, value);
    let numbers = match nested {
        Ok(rows) if rows.len() == 1 => rows.into_iter().flatten().collect(),
        Ok(rows) if rows.len() > 1 => {
            return refuse(value.py(), format!("{name} has {} sequences; pack them into one", rows.len()));
        }
        _ => list(name, wanted, value)?,
    };
    Ok((value.py(), numbers))
}

fn ranges(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Range>> {
    let py = value.py();
    let pairs: Vec<Vec<i64>> = list(name, "a list of (start, end) or a tensor [slices, 2]", value)?;
    let mut ranges = Vec::with_capacity(pairs.len());
    for (index, pair) in pairs.iter().enumerate() {
        let [start, end] = pair[..] else {
            return refuse(
                py,
                format!("{name}[{index}] has {} numbers; a range has a start and an end", pair.len()),
            );
        };
        let name = format!("{name}[{index}]");
        ranges.push(Range { start: size(py, &name, start)?, end: size(py, &name, end)? });
    }
    Ok(ranges)
}

/// One type for each of `count` slices, or one for all.
fn mask_types(value: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<MaskType>> {
    let is_one = value.extract::<i64>().is_ok() || value.extract::<String>().is_ok();
    if is_one {
        return Ok(vec![mask_type("types", value)?; count]);
    }
    let items = listed(value)?;
    let items = items.try_iter().map_err(|_| {
        let found = described(value);
        PyTypeError::new_err(format!("types must be a type, or a list of one for each slice, not {found}"))
    })?;
    items.enumerate().map(|(index, item)| mask_type(&format!("types[{index}]"), &item?)).collect()
}

fn mask_type(name: &str, value: &Bound<'_, PyAny>) -> PyResult<MaskType> {
    const ALL: [MaskType; 4] = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
    let by_number = value.extract::<usize>().ok().and_then(|number| ALL.get(number).copied());
    let named = |kind: &MaskType| value.extract::<String>().is_ok_and(|text| text == kind.name());
    by_number.or_else(|| ALL.into_iter().find(named)).map_or_else(
        || {
            let known = "0 full, 1 causal, 2 inv_causal, 3 bi_causal";
            refuse(value.py(), format!("{name} is {}; the types are {known}", described(value)))
        },
        Ok,
    )
}
