//! Masks and bands against their definitions: cutting, shapes, builders, pictures, text and what is refused. One binary, so that one is linked.

mod band;
mod builders;
mod cases;
mod pairs;
mod raster;
mod shapes;
mod text;
mod validation;
