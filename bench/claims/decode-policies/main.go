// Command decode-policies writes the tables of docs/results/decode-policies.md: decode policies
// side by side on real and drawn traces in the barrier simulator, what BalanceRoute says they
// should show, and how good the predictors are. A user may give other traces of the same formats in
// place of the two embedded ones.
//
// The same program gives the same tables to the bit; nothing outside the marked parts of the
// document changes.
package main

import "evenkeel/bench/tools/policytables"

func main() { program.Main() }

var program = policytables.Program[*book]{
	Name: "decode-policies", Seeds: 5, Traces: policytables.ReadTraces, Blocks: blocks,
	Book: func(b *policytables.Book) *book { return &book{b} },
}
