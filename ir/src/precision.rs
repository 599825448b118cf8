//! Precision by role: the element type of each thing that a training step holds.
//!
//! ```text
//! precision parameters=bf16 compute=bf16 accumulate=f32 master=f32 gradients=f32 reduce=f32
//!     states=f32 saved=bf16 logits=bf16
//! ```
//! which is one line; `products=tf32` may follow. A uniform precision has one type in all roles but
//! sums, and no master weights. A mixed one is what Micikevicius et al. 2018 describe: narrow
//! weights and activations, sums and everything that lasts from step to step in f32.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;

/// How products of activations and weights read their operands.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// As numbers of the compute type.
    #[default]
    Own,
    /// F32, rounded to 10 bits of mantissa; all products but those inside attention.
    Tf32,
    /// Blocks of 128 along the sum, and of 128 × 128 of weights, with a scale each that is a power
    /// of two, and elements of F8E4M3.
    F8E4M3,
    /// The same, but for gradients of activations, whose elements are of F8E5M2.
    F8Hybrid,
}

impl Products {
    /// All of them.
    pub const ALL: [Products; 4] =
        [Products::Own, Products::Tf32, Products::F8E4M3, Products::F8Hybrid];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Products::Own => "own",
            Products::Tf32 => "tf32",
            Products::F8E4M3 => "f8e4m3",
            Products::F8Hybrid => "f8-hybrid",
        }
    }
}

/// The element type of each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Precision {
    /// Weights as layers read them.
    pub parameters: DType,
    /// Activations and their cotangents: operands and results of products.
    pub compute: DType,
    /// Sums of products, statistics, losses and norms.
    pub accumulate: DType,
    /// Copies of the weights that are updated, and from which the weights are rounded; none where
    /// the weights themselves are updated.
    pub master: Option<DType>,
    /// Gradients of weights, added up over micro-batches: where these are narrow, each sum is
    /// rounded once.
    pub gradients: DType,
    /// The same as ranks exchange them.
    pub reduce: DType,
    /// States of the optimizer; f8e4m3 stands for codes with a scale for each block.
    pub states: DType,
    /// Activations that the forward pass keeps for the backward pass; statistics, and what
    /// attention reads beside its own, stay as they are computed.
    pub saved: DType,
    /// The scores over the vocabulary, of which the loss is made.
    pub logits: DType,
    /// How products read their operands.
    #[serde(default)]
    pub products: Products,
}

/// The roles, by their names in texts.
pub const ROLES: [&str; 10] = [
    "parameters",
    "compute",
    "accumulate",
    "master",
    "gradients",
    "reduce",
    "states",
    "saved",
    "logits",
    "products",
];

impl Precision {
    /// One type in all roles, but for sums: of narrow numbers, these and gradients are f32. There
    /// are no master weights.
    pub fn uniform(dtype: DType) -> Precision {
        let wide = dtype.accumulation();
        Precision {
            parameters: dtype,
            compute: dtype,
            accumulate: wide,
            master: None,
            gradients: wide,
            reduce: wide,
            states: dtype,
            saved: dtype,
            logits: dtype,
            products: Products::Own,
        }
    }

    /// What training in a type means where nothing else is said: narrow types have master weights
    /// and states of f32.
    pub fn training(dtype: DType) -> Precision {
        let wide = dtype.accumulation();
        let master = dtype.is_narrow().then_some(wide);
        Precision { master, states: wide, ..Precision::uniform(dtype) }
    }

    /// Whether it is that of one type, without masters.
    pub fn is_uniform(&self) -> bool {
        *self == Precision::uniform(self.compute)
    }

    /// Whether states have 8 bits and a scale for each [`STATE_BLOCK`](crate::program::STATE_BLOCK)
    /// numbers; those of small weights are of the type of sums.
    pub fn has_coded_states(&self) -> bool {
        self.states == DType::F8E4M3 && self.compute != self.states
    }

    /// The type of a state, with scales or without.
    pub fn state(&self, is_coded: bool) -> DType {
        if self.has_coded_states() && !is_coded { self.accumulate } else { self.states }
    }

    /// The type of what is updated: the master weights, where there are some.
    pub fn updated(&self) -> DType {
        self.master.unwrap_or(self.parameters)
    }

    /// The type of a role; none for masters that are not there, for products, or for a role that
    /// is not known.
    pub fn role(&self, name: &str) -> Option<DType> {
        Some(match name {
            "parameters" => self.parameters,
            "compute" => self.compute,
            "accumulate" => self.accumulate,
            "master" => self.master?,
            "gradients" => self.gradients,
            "reduce" => self.reduce,
            "states" => self.states,
            "saved" => self.saved,
            "logits" => self.logits,
            _ => return None,
        })
    }

    /// Sets a role by its name: a type, `none` for masters, or how products read.
    ///
    /// # Errors
    /// A sentence that says what is known.
    pub fn set(&mut self, name: &str, to: &str) -> Result<(), String> {
        let dtype: Option<DType> = to.parse().ok().filter(|dtype: &DType| dtype.is_float());
        if name == "master" && to == "none" {
            self.master = None;
            return Ok(());
        }
        if name == "products" {
            let read = Products::ALL.into_iter().find(|products| products.name() == to);
            let all = Products::ALL.map(Products::name).join(", ");
            self.products = read.ok_or(format!("products read no `{to}`: write one of {all}"))?;
            return Ok(());
        }
        let known = || format!("`{to}` is no floating-point type: write one such as bf16 or f32");
        let role = match name {
            "parameters" => &mut self.parameters,
            "compute" => &mut self.compute,
            "accumulate" => &mut self.accumulate,
            "master" => {
                self.master = Some(dtype.ok_or_else(known)?);
                return Ok(());
            }
            "gradients" => &mut self.gradients,
            "reduce" => &mut self.reduce,
            "states" => &mut self.states,
            "saved" => &mut self.saved,
            "logits" => &mut self.logits,
            _ => return Err(format!("there is no role `{name}`: {}", ROLES.join(", "))),
        };
        *role = dtype.ok_or_else(known)?;
        Ok(())
    }

    /// What programs of this version cannot hold, one sentence each.
    pub fn lacking(&self) -> Vec<String> {
        let mut lacking = Vec::new();
        let mut require = |holds: bool, why: String| {
            if !holds {
                lacking.push(why);
            }
        };
        let Precision { parameters, compute, accumulate, gradients, reduce, .. } = *self;
        let executable = [DType::F64, DType::F32, DType::BF16, DType::F16];
        let is_coded = accumulate == DType::F32 && self.has_coded_states();
        for role in ROLES {
            if let Some(dtype) = self.role(role) {
                let is_there = executable.contains(&dtype) || is_coded && role == "states";
                require(is_there, format!("{role}={dtype}: no kernel computes with it"));
            }
        }
        let wide = compute.accumulation();
        require(
            accumulate == wide,
            format!("accumulate={accumulate}: sums of {compute} are {wide}"),
        );
        require(
            [compute, wide].contains(&parameters),
            format!("parameters={parameters}: with compute={compute} they are {compute} or {wide}"),
        );
        let own = |role: &str, dtype: DType| {
            let holds = [compute, wide].contains(&dtype);
            (holds, format!("{role}={dtype}: with compute={compute} it is {compute} or {wide}"))
        };
        for (role, dtype) in [("states", self.states), ("logits", self.logits)] {
            let (holds, why) = own(role, dtype);
            require(holds || is_coded && role == "states", why);
        }
        let rounds = |dtype: DType| wide == DType::F32 && dtype.is_narrow();
        require(
            gradients == wide || rounds(gradients),
            format!(
                "gradients={gradients}: with compute={compute} they are added up in {wide}{}",
                if wide == DType::F32 { " or narrower" } else { "" }
            ),
        );
        // Narrow ones are summed as they are. Of wrong gradients one error is enough.
        let fits = if gradients == wide { rounds(reduce) } else { !rounds(gradients) };
        require(
            reduce == gradients || fits,
            format!("reduce={reduce}: sums of {gradients} are exchanged as {gradients}{}", {
                if gradients == DType::F32 { " or narrower" } else { "" }
            }),
        );
        require(
            self.saved == compute || !compute.is_narrow() && self.saved.size() < compute.size(),
            format!("saved={}: activations of {compute} are kept as such or narrower", self.saved),
        );
        if let Some(master) = self.master {
            require(
                parameters.is_narrow() && master == wide,
                format!("master={master}: masters are {wide} copies of narrower parameters"),
            );
        }
        lacking.extend(self.misread());
        lacking
    }

    /// What is wrong with how products read, if anything is.
    fn misread(&self) -> Option<String> {
        let (reads, others): (&[DType], _) = match self.products {
            Products::Own => return None,
            Products::Tf32 => (&[DType::F32], "f32"),
            Products::F8E4M3 | Products::F8Hybrid => (&[DType::F32, DType::BF16], "f32 or bf16"),
        };
        let Precision { compute, products, .. } = self;
        let why =
            || format!("products={}: operands are of {compute}, not of {others}", products.name());
        (!reads.contains(compute)).then(why)
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, role) in ROLES.iter().enumerate() {
            let is = match *role {
                "products" if self.products == Products::Own => continue,
                "products" => self.products.name(),
                _ => self.role(role).map_or("none", DType::name),
            };
            write!(f, "{}{role}={is}", if at == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}
