//! Module × cluster → plan.
//!
//! In: a prepared [`ir::Module`] (gradient functions there, composites without kernels inlined), a
//! [`cluster::Cluster`] and a [`compiled::Job`]. Out: an [`ir::Plan`] with predictions, or a
//! diagnostic that says in numbers why there is none.
//!
//! Invariants:
//! * The memory of a plan is that of its compiled programs wherever it can be compiled; where it is
//!   an estimate, the answer says so.
//! * The plan is the fastest one of the space, unless the answer says that it was cut off. Budgets
//!   are counted, so that equal jobs have byte-identical plans.
//! * [`check`] calls neither [`mod@shard`] nor [`search`].
//! * The parts of a predicted time sum to it.
//!
//! Deliberately absent: the planner executes nothing but kernels that it measures, knows no
//! communicator (the caller measures those), and never matches on op kinds to decide how to cut.
//!
//! Reading order: [`divisors`] is arithmetic; [`quantity`], [`link`], [`machine`], [`calibration`]
//! and [`cluster`] are what there is; [`configuration`] and [`estimate`] price uniform plans in
//! closed form; [`tools`] is what others execute; [`mod@shard`] splits the inside of layers, and
//! [`mod@elaborate`] makes a plan of a name; [`price`] and [`simulate`] say how long, [`footprint`]
//! how large; [`limits`] and [`compiled`] decide where candidates are compiled, [`inference`] for
//! generation, [`search`] where candidates are too many, and [`finalists`] compiles what
//! it answers with; [`shrink`] makes a plan for one machine of one for a cluster, and [`check`]
//! doubts; [`explain`] and [`fit`] tell, and [`goodput`] says what failures leave of a run.
//!
//! # Diagnostics
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E3001` | a cluster or calibration file that is no TOML | 6 |
//! | `E3002` | a key that nothing reads | 6 |
//! | `E3003` | a value that is missing | 6 |
//! | `E3004` | a value of the wrong type, or not one of a few names | 6 |
//! | `E3005` | a number without the unit that it needs | 6 |
//! | `E3006` | a cluster that is neither a preset nor a file | 2 |
//! | `E3007` | a file that cannot be read | 7 |
//! | `E3008` | an `extends` that leads nowhere or back | 6 |
//! | `W3009` | a number that no such device or link has | |
//! | `E3101` | a layer that cannot be cut over `tp` as asked | 3 |
//! | `E3102` | a sequence with fewer tokens than tensor-parallel ranks | 3 |
//! | `E3103` | an entry that is not there | 2 |
//! | `E3201` | a job that no plan fits, with the arithmetic and the nearest answer | 3 |
//! | `E3202` | a limit that is none | 2 |
//! | `E3203` | limits that leave no plan | 3 |
//! | `E3204` | more ranks than a model can use | 3 |
//! | `E3205` | a search that was cut off before it found anything that fits | 2 |
//! | `E3301` | a mesh that is not there | 6 |
//! | `E3302` | stages that do not cover the calls | 6 |
//! | `E3303` | a batch of nothing, or one that is not computed once | 6 |
//! | `E3304` | a sharding that a value cannot have | 6 |
//! | `E3305` | a node that cannot be computed in its shardings | 6 |
//! | `E3306` | a weight stored whole, or a gradient that does not lie as its weight | 6 |
//! | `E3307` | one value in two shardings | 6 |
//! | `E3308` | a plan that does not fit in memory | 3 |
//! | `E3309` | a plan of inference that takes a decision of training | 6 |
//! | `E3401` | a configuration that makes no sense | 2 |
//! | `E3402` | the text of a configuration that cannot be read | 2 |
//! | `E3403` | the shape of a model that cannot be | 2 |
//! | `E3404` | a cluster that an estimate is not for | 2 |
//! | `E3405` | experts shared across a part of `tp`, or across `tp` without `sp` | 4 |
//! | `E3406` | adapters that a model on GPUs cannot have | 2 |

pub mod divisors;
pub mod quantity;
mod reader;

pub mod origin;
pub mod link;
pub mod machine;
pub mod calibration;
pub mod calibrate;
pub mod cluster;

pub mod configuration;
pub mod estimate;
pub mod tools;
pub mod validate;

pub mod shard;
pub mod elaborate;
pub mod price;
pub mod simulate;
pub mod footprint;
pub mod limits;
pub mod compiled;
pub mod inference;
pub mod search;
pub mod finalists;

pub mod shrink;
pub mod check;
pub mod explain;
pub mod goodput;
pub mod fit;
