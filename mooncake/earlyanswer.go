package mooncake

import (
	"bytes"
	"errors"
	"fmt"

	"evenkeel/rawjson"
)

// ErrPrefillFailed says that a prefill engine answered 200, and has not done its part:
// the KV that it wrote to the decode engine may be incomplete.
var ErrPrefillFailed = errors.New("mooncake: the prefill engine did not finish the prompt")

// ReadEarlyProbe reads the 200 of EarlyProbe: JSON, or the events of a stream
// from SGLang. knownHost is that of ReadProbe. The errors are ErrPrefillFailed, and for
// nixl-push those of ReadProbe; what could be read is returned beside them.
//
// An SGLang engine that was aborted while it wrote may answer as if it were not, but counts fewer
// PromptTokens than the decode engine does.
func (p *Profile) ReadEarlyProbe(answer []byte, knownHost func(host string) bool) (ProbeAnswer, error) {
	if p.Connector == NIXLPush {
		return p.ReadProbe(answer, nil, knownHost)
	}
	a := ProbeAnswer{CachedTokens: -1}
	if len(answer) > MaxProbeAnswer {
		return a, fmt.Errorf("%w: its answer has %d bytes, more than %d", ErrPrefillFailed, len(answer), MaxProbeAnswer)
	}
	if trimmed := bytes.TrimSpace(answer); p.Connector != SGLang || len(trimmed) > 0 && trimmed[0] == '{' {
		if err := a.add(answer); err != nil {
			return a, err
		}
	} else {
		for line := range bytes.Lines(answer) {
			data, ok := bytes.CutPrefix(line, []byte("data:"))
			data = bytes.TrimSpace(data)
			if !ok || string(data) == "[DONE]" {
				continue
			}
			if err := a.add(data); err != nil {
				return a, err
			}
		}
	}
	switch a.FinishReason {
	case "", "abort", "error":
		return a, fmt.Errorf("%w: finish_reason is %s", ErrPrefillFailed, reasonOf(a.FinishReason))
	}
	return a, nil
}

// add reads an answer, or a part of one that comes in events.
func (a *ProbeAnswer) add(part []byte) error {
	got, err := scanAnswer(part)
	if err != nil {
		return fmt.Errorf("%w: its answer is not JSON: %w", ErrPrefillFailed, err)
	}
	if got.err != nil && !rawjson.IsNull(got.err) {
		return fmt.Errorf("%w: an error came with status 200; the engine's log says which", ErrPrefillFailed) // not quoted: it may repeat the prompt
	}
	told := got.read()
	if told.PromptTokens > 0 {
		a.PromptTokens = told.PromptTokens
	}
	if told.CachedTokens >= 0 {
		a.CachedTokens = told.CachedTokens
	}
	if told.PromptTokenIDs != nil {
		a.PromptTokenIDs = told.PromptTokenIDs
	}
	if told.FinishReason != "" {
		a.FinishReason = told.FinishReason
	}
	return nil
}

// coordinates are those of the engine whose hand-off was checked.
func (h *handoff) coordinates() *Coordinates {
	c := &Coordinates{EngineID: text(h.engineID), Host: text(h.host)}
	c.Port, _ = rawjson.Int(h.port, 0, len(h.port))
	c.TPSize, _ = rawjson.Int(h.tpSize, 0, len(h.tpSize))
	c.PPSize, _ = rawjson.Int(h.ppSize, 0, len(h.ppSize))
	c.DCPSize, _ = rawjson.Int(h.dcpSize, 0, len(h.dcpSize))
	return c
}
