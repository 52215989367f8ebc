package index_test

import (
	"encoding/json"
	"fmt"

	"evenkeel/prefill/index"
)

// Two turns of one conversation: the second finds what the first computed.
func Example() {
	x := index.New(index.Config{})
	p0, p1 := x.Add("p0/0", 4096), x.Add("p1/0", 4096)
	root := index.Scope{Model: "m"}.Root(index.Bytes, index.BlockBytes)

	var hasher index.Hasher
	turn := func(history string) []index.Key {
		return hasher.Chat(nil, root, json.RawMessage(`[{"role":"user","content":"`+history+`"}]`), nil).Keys
	}
	long := fmt.Sprintf("%01024d", 7)

	probe := x.Speculate(p1, turn(long)) // p1 was chosen
	x.Confirm(&probe)                    // and has answered

	match := x.Match(nil, turn(long+"and then?"))
	fmt.Println(match[p0.N], match[p1.N])
	// Output: 0 4
}
