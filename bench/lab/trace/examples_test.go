package trace_test

import (
	"fmt"
	"strings"

	"evenkeel/bench/lab/trace"
)

func ExampleParse() {
	file := "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.0,396,109\n2023-11-16 18:15:46.5,374,44\n"
	t, err := trace.Parse(strings.NewReader(file), trace.Options{Name: "azure.csv"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, r := range t.Requests {
		fmt.Println(r.At, r.Prompt, r.Output)
	}
	fmt.Println(t.Notes())
	// Output:
	// 0s 374 44
	// 3.5s 396 109
	// [rows were not in order of arrival and were sorted]
}
