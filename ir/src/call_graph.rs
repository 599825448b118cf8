//! Which functions of a module call which.

use std::collections::BTreeSet;

use petgraph::Direction;
use petgraph::graphmap::DiGraphMap;
use petgraph::visit::Dfs;

use crate::module::{Module, Node};

/// The functions of a module by name, each with an edge to every function that it calls.
pub struct CallGraph<'m>(DiGraphMap<&'m str, ()>);

impl<'m> CallGraph<'m> {
    /// Reads all calls of a module. Linear.
    pub fn of(module: &'m Module) -> CallGraph<'m> {
        let mut graph = DiGraphMap::new();
        for function in &module.functions {
            graph.add_node(function.name.as_str());
            for callee in function.nodes.iter().filter_map(Node::callee) {
                graph.add_edge(&function.name, callee, ());
            }
        }
        CallGraph(graph)
    }

    /// Whether any function calls this one.
    pub fn is_called(&self, function: &str) -> bool {
        self.0.neighbors_directed(function, Direction::Incoming).next().is_some()
    }

    /// The functions that some of the given ones call, directly or not, and those themselves.
    pub fn reached(&self, from: impl IntoIterator<Item = &'m str>) -> BTreeSet<&'m str> {
        let mut walk = Dfs::empty(&self.0);
        let mut reached = BTreeSet::new();
        for function in from {
            walk.move_to(function);
            while let Some(function) = walk.next(&self.0) {
                reached.insert(function);
            }
        }
        reached
    }
}
