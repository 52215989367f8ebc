package draft

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"slices"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// handOffTest says how an engine answered a request that asks it to hand its KV over.
type handOffTest uint8

const (
	unreached  handOffTest = iota // the engine's health check failed, or Ask was not called
	untried                       // no test request was sent, or it got no answer
	noHandOff                     // the answer has no hand-off: the engine has no connector, or hands over in another way
	hasHandOff                    // the answer has a hand-off, so the engine can prefill for others
)

// tryHandOff sends a request for one token and a hand-off, as the proxy does for a prefill, and
// sets handOff by the answer. If the answer has a hand-off, this also shows the connector. Only
// tryHandOff shows the role of a vLLM engine that does not run in developer mode.
func (e *Entry) tryHandOff(ctx context.Context, client *engine.Client, target *engine.Target) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	probe, err := handOffRequest(e.model)
	if err != nil {
		return // cannot happen, because the request is always valid
	}
	call := client.NewCall(target)
	defer context.AfterFunc(ctx, call.Abort)()
	resp, err := call.Do(http.MethodPost, mooncake.Completions.Path(), engine.JSONHeaders("ek-init"), probe, engine.Deadlines{})
	if err != nil { // no answer, so handOff stays as it is (untried)
		return
	}
	defer resp.Close()
	text, err := resp.ReadAll(maxAnswerBytes)
	var answer struct {
		KV map[string]json.RawMessage `json:"kv_transfer_params"`
	}
	if err != nil || resp.StatusCode() != http.StatusOK || json.Unmarshal(text, &answer) != nil { // such an answer shows no role
		return
	}
	e.handOff = noHandOff
	if len(answer.KV) > 0 {
		e.handOff = hasHandOff
		e.Connector = cmp.Or(e.Connector, mooncake.ConnectorOf(text))
	}
}

// handOffRequest returns the body of a completion request for one token and a hand-off, in the
// pieces in which it is sent. The connector of the engine is not known, so the request is the one
// that a profile without a connector makes: kv_transfer_params asks for a hand-off in the way of
// vLLM.
func handOffRequest(model string) ([][]byte, error) {
	// text and numbers can always be marshalled
	asked, _ := json.Marshal(map[string]any{"model": model, "prompt": "a", "max_tokens": 1, "stream": false})
	body, err := mooncake.ScanBody(asked, 0) // 0: the usual limit for nested values
	if err != nil {
		return nil, err
	}
	return (&mooncake.Profile{}).ProbeBody(&body, mooncake.Completions, nil, nil, nil), nil
}

// decideRoles decides the role of engines that reported none. An engine without a hand-off is
// aggregated, unless another engine prefills or
// decodes: then its connector may be one that puts no hand-off into answers.
func decideRoles(entries []Entry) {
	anyPair := slices.ContainsFunc(entries, func(e Entry) bool {
		return e.handOff == hasHandOff || e.Role == "prefill" || e.Role == "decode"
	})
	for i := range entries {
		switch e := &entries[i]; {
		case e.Role != "" || e.handOff == unreached: // the role is known, or the engine has not answered at all
		case e.handOff == noHandOff && !anyPair:
			e.setRole("aggregated", "when it was asked to hand a prompt over, it handed nothing over")
			e.addNote("Some connectors hand over in another way (MooncakeConnector, MooncakeLayerwiseConnector). If it has one of these, run init " +
				"again with its role before the address.")
			e.addNote("It does not tell its --prefill-schedule-interval. If that is above 1, write it as prefill_schedule_interval.")
		default:
			e.addNote("Nothing that it answers says whether it prefills or decodes.")
		}
	}
}
