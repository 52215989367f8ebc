// Command prefill-policies writes the tables of docs/results/prefill-policies.md: prefill policies
// side by side on real and drawn traces, at several loads, and what is promised of the default. A
// user may give other traces of the same formats in place of the two embedded ones.
//
// The same program gives the same tables to the bit; nothing outside the marked parts of the
// document changes.
package main

import "evenkeel/bench/tools/policytables"

func main() { program.Main() }

var program = policytables.Program[*book]{
	Name: "prefill-policies", Seeds: 10, Traces: policytables.ReadTraces, Blocks: blocks, // a seed is a block of the trace
	Book: func(b *policytables.Book) *book { return &book{b} },
}
