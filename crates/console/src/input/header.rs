//! The header of a safetensors file, read so that every error names its tensor.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::value::StrDeserializer;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::input_fault::{EntryFault, FileFault};

/// The header of a safetensors file, every tensor checked by itself. Read here and not by the format's library, whose
/// errors do not say which tensor they mean and which takes the last of two tensors of one name without a word.
#[derive(Debug)]
pub(super) struct FileHeader {
    /// Tensors by name. Offsets are from the end of the header, in bytes.
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// Bytes of all tensors.
    pub(super) data_bytes: usize,
}

impl FileHeader {
    /// Reads a header, `json` being all of its bytes. The error says what is wrong, and where.
    pub(super) fn parse(json: &[u8]) -> Result<Self, FileFault> {
        if json.first() != Some(&b'{') {
            return Err(FileFault::NoObject);
        }
        let Entries(entries) = serde_json::from_slice(json).map_err(FileFault::Header)?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries {
            let info = entry.checked().map_err(|reason| FileFault::Entry { name: name.clone(), reason })?;
            if tensors.insert(name.clone(), info).is_some() {
                return Err(FileFault::Twice { name });
            }
        }
        // That tensors lie one after the other, without gaps, is the library's to say.
        let mut in_order: Vec<(String, TensorInfo)> =
            tensors.iter().map(|(name, info)| (name.clone(), info.clone())).collect();
        in_order.sort_by_key(|(_, info)| info.data_offsets);
        let header = Metadata::new(None, in_order).map_err(FileFault::Gaps)?;
        Ok(Self { tensors, data_bytes: header.data_len() })
    }
}

/// Tensors as they stand in the file.
struct Entries(Vec<(String, Entry)>);

/// One of them.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with dtype, shape and data_offsets")]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<HashMap<String, IgnoredAny>>()?;
                        continue;
                    }
                    let entry = map
                        .next_value()
                        .map_err(|error| A::Error::custom(format!("tensor `{name}`: {error}")))?;
                    entries.push((name, entry));
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

impl Entry {
    /// The entry with its type, when its bytes are as many as its shape takes.
    fn checked(self) -> Result<TensorInfo, EntryFault> {
        let Self { dtype: name, shape, data_offsets } = self;
        let known =
            |name: &str| Dtype::deserialize(StrDeserializer::<serde::de::value::Error>::new(name)).ok();
        let dtype = known(&name).ok_or_else(|| {
            let upper = name.to_uppercase();
            match known(&upper) {
                Some(_) => EntryFault::Case { name: name.clone(), written: upper },
                None => EntryFault::Type { name: name.clone() },
            }
        })?;
        let (begin, end) = data_offsets;
        if end < begin {
            return Err(EntryFault::Offsets { begin, end });
        }
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &length| bits.checked_mul(length));
        let Some(bits) = bits else { return Err(EntryFault::Shape { shape }) };
        // Types narrower than a byte may not fill their last one; the format does not allow that.
        let bytes = end - begin;
        if !bits.is_multiple_of(8) || bits / 8 != bytes {
            return Err(EntryFault::Bytes { bytes, shape, dtype, bits });
        }
        Ok(TensorInfo { dtype, shape, data_offsets })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_format_allows() {
        let json = br#"{"__metadata__": {"made by": "hand"},
            "k": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]},
            "q": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
            "empty": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [8, 8]}}  "#;
        let header = FileHeader::parse(json).unwrap();
        assert_eq!(header.data_bytes, 8);
        let names: Vec<&str> = header.tensors.keys().map(String::as_str).collect();
        assert_eq!(names, ["empty", "k", "q"]);
        assert_eq!((header.tensors["k"].dtype, &header.tensors["k"].shape[..]), (Dtype::F16, &[2][..]));
        assert_eq!(FileHeader::parse(b"{}").unwrap().data_bytes, 0);
    }

    #[test]
    fn errors_name_the_tensor() {
        let entry = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"q": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
        };
        let one = r#"{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}"#;
        let metadata = r#"{"__metadata__": 3}"#;
        for (json, words) in [
            (entry("f32", "[1]", "[0, 4]"), &["`q`", "`f32`", "written `F32`"][..]),
            (entry("F7", "[1]", "[0, 4]"), &["`q`", "`F7`", "F64, F32, BF16 and F16"]),
            (entry("F32", "[2]", "[0, 4]"), &["`q`", "4 bytes", "[2] of F32", "takes 8"]),
            (entry("F4", "[3]", "[0, 1]"), &["`q`", "1 bytes", "takes 1.5"]),
            (entry("F32", "[1]", "[4, 0]"), &["`q`", "ends before"]),
            (entry("F32", "[1]", "[4, 8]"), &["`q`", "without gaps"]),
            (entry("F32", "[4294967296, 4294967296]", "[0, 4]"), &["`q`", "4294967296", "more than"]),
            (entry("F32", "[-1]", "[0, 4]"), &["`q`", "-1"]),
            (entry("F32", "3", "[0, 4]"), &["`q`", "sequence"]),
            (entry("F32", "[1]", "[0]"), &["`q`"]),
            (format!(r#"{{"q": {one}, "q": {one}}}"#), &["two tensors `q`"]),
            (r#"{"q": {"dtype": "F32", "dtype": "F32"}}"#.to_owned(), &["`q`", "duplicate", "dtype"]),
            (r#"{"q": {"dtype": "F32"}}"#.to_owned(), &["`q`", "missing", "shape"]),
            (r#"{"q": 1}"#.to_owned(), &["`q`"]),
            (metadata.to_owned(), &["header cannot be read"]),
            ("[]".to_owned(), &["not a JSON object of tensors by name"]),
            ("{".to_owned(), &["header cannot be read"]),
            ("{}x".to_owned(), &["header cannot be read"]),
        ] {
            let error = FileHeader::parse(json.as_bytes()).unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{json}: no `{word}` in {error}");
            }
            assert!(!error.contains("struct") && error.matches(" at line ").count() <= 1, "{error}");
        }
    }
}
