package mooncake_test

import (
	"bytes"
	"fmt"
	"time"

	"evenkeel/mooncake"
)

// One request: probe the prefill engine, keep its handoff, decode.
func Example() {
	profile := mooncake.Profile{Connector: mooncake.NIXLPull, ReturnTokenIDs: new(false)}.WithDefaults()
	body, err := mooncake.ScanBody([]byte(`{"model":"m", "messages":[{"role":"user","content":"Hi"}], "max_tokens":9}`), 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	probe := profile.ProbeBody(&body, mooncake.Chat, nil, nil, nil)
	fmt.Printf("%s\n", bytes.Join(probe, nil))

	answered := time.Unix(100, 0)
	answer, err := profile.ReadProbe([]byte(`{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,
		"remote_block_ids":[[7]],"remote_engine_id":"e","remote_host":"p0","remote_port":5600}}`), nil,
		func(host string) bool { return host == "p0" })
	if err != nil {
		fmt.Println(err)
		return
	}
	budget, err := profile.HoldBudget()
	if err != nil {
		fmt.Println(err)
		return
	}
	handoff := mooncake.NewHandoff(answer.KV, answered.Add(budget), answered.Add(profile.KVHoldTimeout))
	_, err = handoff.Acquire(answered.Add(time.Second))
	fmt.Println(err)
	_, err = handoff.Acquire(answered.Add(2 * time.Second))
	fmt.Println(err)
	// Output:
	// {"model":"m", "messages":[{"role":"user","content":"Hi"}],"stream":false,"max_tokens":1,"min_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}
	// <nil>
	// mooncake: the hand-off was already used
}
