package refengine_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
)

// An engine answers in the language of reftext, so a client that knows the
// prompt knows the answer.
func ExampleStart() {
	e, err := refengine.Start(refengine.Config{DPSize: 2, Slots: 16})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer e.Close()
	resp, err := http.Post(e.URLs()[1]+"/v1/completions", "application/json", strings.NewReader(`{"model":"ref","prompt":"the quick brown fox","max_tokens":3}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer http.DefaultClient.CloseIdleConnections()
	var got struct{ Choices []struct{ Text string } }
	err = json.NewDecoder(resp.Body).Decode(&got)
	_ = resp.Body.Close()
	fmt.Println(err, got.Choices[0].Text == reftext.Text(reftext.Of("the quick brown fox").Answer, 3))
	fmt.Println(e.Stats().LocalPrefills, "prompt came without a hand-off")
	// Output:
	// <nil> true
	// 1 prompt came without a hand-off
}

// Faults strike the requests they name, as often as they say.
func ExampleEngine_SetFaults() {
	e, err := refengine.Start(refengine.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer e.Close()
	err = e.SetFaults(
		refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5, Leg: refengine.LegDecode, Count: 1},
		refengine.Rule{Fault: refengine.Busy, Probability: 0.01},
	)
	fmt.Println(err)
	fmt.Println(e.SetFaults(refengine.Rule{Fault: refengine.Busy, Phase: refengine.PhaseMidStream}))
	// Output:
	// <nil>
	// refengine: fault 0: fault busy has no phase "mid-stream"; use one of [""]
}
