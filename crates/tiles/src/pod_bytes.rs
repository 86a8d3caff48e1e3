//! Lists of plain structs as bytes, which is how tables that are made in another process are written and read.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::Pod;
use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Writes the bytes of all elements.
pub(crate) fn serialize<T: Pod, S: Serializer>(list: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytemuck::cast_slice(list))
}

/// Reads as many elements as there are bytes for.
pub(crate) fn deserialize<'de, T: Pod, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_bytes(ListOf(PhantomData))
}

struct ListOf<T>(PhantomData<T>);

impl<T: Pod> Visitor<'_> for ListOf<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes, {} of each element", size_of::<T>())
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<T>, E> {
        if !bytes.len().is_multiple_of(size_of::<T>()) {
            return Err(E::invalid_length(bytes.len(), &self));
        }
        Ok(bytemuck::pod_collect_to_vec(bytes))
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{BytesDeserializer, Error};

    use super::*;
    use crate::TileRun;

    #[test]
    fn elements_are_read_from_any_address_and_whole() {
        let runs = [1, 2].map(|start| TileRun { start, end: 9, bound_begin: 3, bound_end: 4 });
        let mut bytes = vec![0];
        bytes.extend_from_slice(bytemuck::cast_slice(&runs));
        let read = |bytes| deserialize::<TileRun, _>(BytesDeserializer::<Error>::new(bytes));
        assert_eq!(read(&bytes[1..]).unwrap(), runs);
        assert_eq!(read(&[]).unwrap(), []);
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("33") && error.contains("16 of each element"), "{error}");
    }
}
