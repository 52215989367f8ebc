package main

import "slices"

// rows are all rows, in an order that needs few restarts.
var rows = allRows()

func allRows() (all []row) {
	for _, s := range shapes {
		all = append(all, s.row())
	}
	return slices.Concat(all, clients, caches, loads, troubles, promptLogprobs, dataParallel)
}
