package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/internal/rawjson"
)

// An error of ReadProbe wraps one of these, or ErrUnknownHost.
var (
	// ErrNoHandoff means that the prefill engine answered 200, but keeps no KV blocks. If FinishReason
	// is "stop", the first token ended the answer. Otherwise the engine preempted the request and gave
	// its blocks away, and a new probe may succeed.
	ErrNoHandoff  = errors.New("mooncake: the prefill engine returned no hand-off")
	ErrBadHandoff = errors.New("mooncake: the prefill engine returned a malformed hand-off")
)

const (
	// MaxProbeAnswer bounds the answer of a probe, in bytes: the token ids of a prompt of a million
	// tokens take about 7 MB.
	MaxProbeAnswer = 16 << 20
	// maxHandoff is in bytes: the block ids of a million tokens take about 100 KB.
	maxHandoff = 1 << 20
	// maxName bounds each name in a hand-off, in bytes.
	maxName = 512
)

// ProbeAnswer is the answer of a prefill engine to a probe, the request that makes it run prefill.
type ProbeAnswer struct {
	KV             json.RawMessage // the hand-off, copied byte for byte from the answer
	PromptTokens   int             // possibly one less than the decode engine's count; 0: not reported
	CachedTokens   int             // tokens of the prompt found in the prefix cache; -1: not reported
	PromptTokenIDs json.RawMessage // JSON list that points into the answer; nil: not reported
	FinishReason   string
	Aborted        bool   // the FinishReason is abort, and not with the status of an error
	EngineID       string // id of the engine that keeps the blocks; empty: not reported

	// ReusesRequestID says that the decode request must have the X-Request-Id of the probe: the decode
	// engine reports a finished pull, or the blocks to write to, under its own request's id, and the
	// hand-off has no id or the engine ignores it. With another id, the prefill engine would keep its
	// blocks until the hold timeout or, if it pushes, write nothing.
	ReusesRequestID bool
}

// ReadProbe reads the JSON of an answer with status 200 to a probe. Unknown members are allowed,
// because each engine version has others. With vllm-mooncake, the answer has no hand-off, and it is
// made from info. knownHost says whether a hand-off may name a host; nil: no host. With
// ErrNoHandoff, the ProbeAnswer is valid except for the hand-off.
func (p *Profile) ReadProbe(answer []byte, info *BootstrapInfo, knownHost func(host string) bool) (ProbeAnswer, error) {
	if len(answer) > MaxProbeAnswer {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer has %d bytes, more than %d", ErrBadHandoff, len(answer), MaxProbeAnswer)
	}
	members, err := scanAnswer(answer)
	if err != nil {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer is not JSON: %w", ErrBadHandoff, err)
	}
	if members.err != nil && !rawjson.IsNull(members.err) {
		return ProbeAnswer{}, fmt.Errorf("%w: %w", ErrBadHandoff, &SaidError{answer})
	}
	answered := members.probeAnswer()
	if p.Connector == VLLMMooncake {
		err := answered.setBootstrapHandoff(info)
		return answered, err
	}
	kv := members.kv
	if kv == nil || rawjson.IsNull(kv) {
		return answered, fmt.Errorf("%w: kv_transfer_params is missing or null, finish_reason is %s; start the engine with kv_role "+
			"kv_producer", ErrNoHandoff, shownFinishReason(answered.FinishReason))
	}
	if len(kv) > maxHandoff {
		return answered, fmt.Errorf("%w: kv_transfer_params has %d bytes, more than %d", ErrBadHandoff, len(kv), maxHandoff)
	}
	h, ok := readHandoff(kv)
	if !ok {
		return answered, fmt.Errorf("%w: kv_transfer_params is not an object: %s", ErrBadHandoff, describeValue(kv))
	}
	if err := p.checkHandoff(&h); err != nil {
		return answered, err
	}
	answered.ReusesRequestID = p.matchesByRequestID(&h)
	if p.Connector != Opaque { // the hosts of an opaque hand-off are not known
		if err := p.checkHosts(kv, knownHost); err != nil {
			return answered, err
		}
	}
	answered.KV, answered.EngineID = bytes.Clone(kv), stringValue(h.engineID)
	return answered, nil
}

func (a *ProbeAnswer) setBootstrapHandoff(info *BootstrapInfo) error {
	isComplete := info != nil && info.TransferID != "" && info.BootstrapAddr != "" && info.EngineID != ""
	if !isComplete {
		return fmt.Errorf("%w: the exchange lacks transfer id, bootstrap address or engine id; query the bootstrap server "+
			"first", ErrBadHandoff)
	}
	if a.FinishReason != "length" {
		// The engine keeps the KV only for a request that ended at its token limit.
		return fmt.Errorf("%w: finish_reason is %s", ErrNoHandoff, shownFinishReason(a.FinishReason))
	}
	a.KV, a.EngineID = info.handoff(), info.EngineID
	return nil
}

// SaidError is an error with status 200. SGLang sends it because it begins a stream before it
// checks the request (0.5.23, http_server.py).
type SaidError struct {
	Answer []byte // the answer, or the event with the error; points into the caller's buffer
}

func (e *SaidError) Error() string {
	// The answer is not quoted, because it may repeat the prompt.
	return "an error came with status 200; the engine's log says which"
}

// answerMembers are those that evenkeel reads; nil: the answer has no such member.
type answerMembers struct {
	err, kv, usage, choices, promptIDs, status, stopReason json.RawMessage

	inner json.RawMessage
}

// scanAnswer takes the last value of a repeated key, as Body.Get does.
func scanAnswer(answer []byte) (s answerMembers, err error) {
	members := 0
	_, err = rawjson.Scan(answer, 0, func(at rawjson.Place) string {
		if members++; members > maxMembers {
			return tooManyMembers
		}
		value := json.RawMessage(answer[at.Val:at.ValEnd:at.ValEnd])
		switch string(rawjson.KeyText(answer[at.Key+1 : at.KeyEnd-1])) {
		case "error":
			s.err = value
		case "kv_transfer_params":
			s.kv = value
		case "usage":
			s.usage = value
		case "meta_info": // SGLang's /generate
			if value[0] == '{' {
				s.usage = value
			}
		case "choices":
			s.choices = value
		case "status": // /v1/responses
			s.status = value
		case "stop_reason": // /v1/messages
			s.stopReason = value
		case "response", "message", "delta": // events of /v1/responses and /v1/messages
			if value[0] == '{' {
				s.inner = value
			}
		case "prompt_token_ids": // of a chat; a completion has it in its choice
			s.promptIDs = value
		}
		return ""
	})
	return s, err
}

// Each endpoint has its own names for the same values, and an answer has only those of its
// endpoint.
func (s *answerMembers) probeAnswer() ProbeAnswer {
	a := ProbeAnswer{CachedTokens: -1, PromptTokenIDs: tokenList(s.promptIDs)}
	a.readUsage(s.usage)
	if choices := rawjson.ArrayAt(s.choices, 0); choices.Next() {
		ids := json.RawMessage(nil)
		for o := rawjson.ObjectAt(s.choices, choices.Val); o.NextValue(); {
			switch string(rawjson.KeyText(o.Key)) {
			case "finish_reason":
				a.FinishReason = finishReason(o.Value())
				a.Aborted = a.FinishReason == "abort"
			case "prompt_token_ids":
				ids = tokenList(o.Value())
			}
		}
		if a.PromptTokenIDs == nil {
			a.PromptTokenIDs = ids
		}
	}
	switch string(s.status) { // /v1/responses
	case `"incomplete"`:
		a.FinishReason = "length"
	case `"completed"`:
		a.FinishReason = "stop"
	}
	switch string(s.stopReason) { // /v1/messages
	case "", "null":
	case `"max_tokens"`, `"stop_sequence"`: // the stop string that evenkeel adds to a probe
		a.FinishReason = "length"
	default:
		a.FinishReason = "stop"
	}
	return a
}

func (a *ProbeAnswer) readUsage(usage json.RawMessage) {
	readFromCache, writtenToCache := 0, 0 // at /v1/messages, input_tokens does not include these
	for key, value := range rawjson.Members(usage) {
		switch key {
		case "prompt_tokens", "input_tokens":
			a.PromptTokens = max(tokenCount(value), 0)
		case "cache_creation_input_tokens":
			writtenToCache = max(tokenCount(value), 0)
		case "cache_read_input_tokens":
			a.CachedTokens = tokenCount(value)
			readFromCache = max(a.CachedTokens, 0)
		case "cached_tokens":
			a.CachedTokens = tokenCount(value)
		case "finish_reason": // an object in meta_info
			hasStatus := false
			for key, value := range rawjson.Members(value) {
				switch key {
				case "type":
					a.FinishReason = finishReason(value)
				case "status_code":
					// SGLang gives a status to its own aborts (0.5.23, FINISH_ABORT in
					// managers/schedule_batch.py).
					hasStatus = !rawjson.IsNull(value)
				}
			}
			a.Aborted = a.FinishReason == "abort" && !hasStatus
		case "prompt_tokens_details", "input_tokens_details":
			a.CachedTokens = -1
			for key, value := range rawjson.Members(value) {
				if key == "cached_tokens" {
					a.CachedTokens = tokenCount(value)
				}
			}
		}
	}
	a.PromptTokens += readFromCache + writtenToCache
}

// tokenCount returns -1, which means "not reported", for anything but a whole number.
func tokenCount(value json.RawMessage) int {
	if n, ok := rawjson.Int(value, 0, len(value)); ok {
		return n
	}
	return -1
}

// It allocates nothing for "length", with which most probes end.
func finishReason(value json.RawMessage) string {
	if string(value) == `"length"` {
		return "length"
	}
	return stringValue(value)
}

// handoff is a parsed kv_transfer_params. A field is nil if there is no such member.
type handoff struct {
	members int

	doPrefill, mode, blockIDs, engineID, host, requestID, port json.RawMessage
}

// readHandoff takes valid JSON. ok is false if it is not an object, or has too many members.
func readHandoff(kv json.RawMessage) (h handoff, ok bool) {
	for o := rawjson.ObjectAt(kv, 0); o.NextValue(); {
		h.members++
		value := o.Value()
		switch string(rawjson.KeyText(o.Key)) {
		case "do_remote_prefill":
			h.doPrefill = value
		case "remote_block_ids":
			h.blockIDs = value
		case "remote_engine_id":
			h.engineID = value
		case "remote_host":
			h.host = value
		case "remote_request_id":
			h.requestID = value
		case "transfer_mode":
			h.mode = value
		case "remote_port":
			h.port = value
		}
	}
	return h, kv[0] == '{' && h.members <= maxMembers
}

// With connector opaque, the members are not known, so the hand-off only must not be empty.
func (p *Profile) checkHandoff(h *handoff) error {
	if h.members == 0 {
		return fmt.Errorf("%w: kv_transfer_params is {}", ErrNoHandoff)
	}
	if p.Connector == Opaque {
		return nil
	}
	if err := p.checkTransferMode(h); err != nil {
		return err
	}
	if string(h.doPrefill) != "true" {
		return fmt.Errorf("%w: do_remote_prefill is %s, not true", ErrBadHandoff, describeValue(h.doPrefill))
	}
	return h.checkSource()
}

// The host may still be an unknown one, which checkHosts refuses.
func (h *handoff) checkSource() error {
	switch n, ok := countBlocks(h.blockIDs); {
	case !ok:
		return fmt.Errorf("%w: remote_block_ids is %s, not a list of block numbers or a list of such lists", ErrBadHandoff,
			describeValue(h.blockIDs))
	case n == 0: // preempted: an empty list would crash the decode engine
		return fmt.Errorf("%w: remote_block_ids is empty", ErrNoHandoff)
	}
	switch {
	case !isName(h.engineID):
		return fmt.Errorf("%w: remote_engine_id is %s, not a name", ErrBadHandoff, describeValue(h.engineID))
	case !isName(h.host):
		return fmt.Errorf("%w: remote_host is %s, not a name", ErrBadHandoff, describeValue(h.host))
	case h.requestID != nil && !isName(h.requestID): // old engine versions send no request id
		return fmt.Errorf("%w: remote_request_id is %s, not a name", ErrBadHandoff, describeValue(h.requestID))
	}
	if port, err := strconv.Atoi(string(h.port)); err != nil || port < 1 || port > 65535 {
		return fmt.Errorf("%w: remote_port is %s, not a port", ErrBadHandoff, describeValue(h.port))
	}
	return nil
}

// matchesByRequestID: see ProbeAnswer.ReusesRequestID.
func (p *Profile) matchesByRequestID(h *handoff) bool {
	switch p.Connector {
	case Opaque:
		return false
	case NIXLPush: // its engines ignore the id in the hand-off
		return true
	}
	// vllm-ascend before 0.14 and NIXL in vLLM before 0.13 send no request id in the hand-off.
	return h.requestID == nil
}

// checkTransferMode refuses a hand-off of the other NIXL connector, with which each engine would
// wait for the other for ever. vLLM before 0.32 sends no transfer_mode, so it cannot be checked
// there.
func (p *Profile) checkTransferMode(h *handoff) error {
	if h.mode == nil || !p.nixl() {
		return nil
	}
	pushes := string(h.mode) == `"push"`
	if pushes == (p.Connector == NIXLPush) {
		return nil
	}
	runs, wanted := "NixlConnector", NIXLPull
	if pushes {
		runs, wanted = "NixlPushConnector", NIXLPush
	}
	return fmt.Errorf("%w: the engine runs %s; set connector: %s in the profile of both engines", ErrBadHandoff, runs, wanted)
}

func isName(raw json.RawMessage) bool {
	if len(raw) <= len(`""`) || raw[0] != '"' {
		return false
	}
	n := len(raw) - len(`""`)
	if bytes.IndexByte(raw, '\\') >= 0 { // only escapes must be decoded to count the bytes
		n = len(rawjson.Unquote(raw))
	}
	return n <= maxName
}

// countBlocks counts the block numbers in a list, or in a list of lists, one per KV cache group.
func countBlocks(ids json.RawMessage) (n int, ok bool) {
	if len(ids) == 0 || ids[0] != '[' {
		return 0, false
	}
	flat, nested := 0, 0
	for id := range rawjson.Elements(ids) {
		if id[0] != '[' {
			flat++
			if !isBlockNumber(id) {
				return 0, false
			}
			continue
		}
		nested++
		for id := range rawjson.Elements(id) {
			n++
			if !isBlockNumber(id) {
				return 0, false
			}
		}
	}
	return n + flat, flat == 0 || nested == 0 // with both, it is neither
}

func isBlockNumber(raw json.RawMessage) bool {
	for _, c := range raw {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// stringValue returns an empty string for a value that is not a string.
func stringValue(raw json.RawMessage) string {
	if len(raw) == 0 || raw[0] != '"' {
		return ""
	}
	return rawjson.Unquote(raw)
}

// tokenList returns nil for a value that is not a list, and does not check the elements.
func tokenList(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 || raw[0] != '[' {
		return nil
	}
	return raw
}

// ErrPrefillFailed means that a prefill engine answered 200 but did not finish the prompt, so the
// KV that it wrote to the decode engine may be incomplete.
var ErrPrefillFailed = errors.New("mooncake: the prefill engine did not finish the prompt")

// ReadEarlyProbe reads an answer with status 200, JSON or a stream of events, to the probe of a
// request that was bound to its decode rank before. Its error wraps ErrPrefillFailed, and the
// ProbeAnswer then has what was read so far.
//
// An SGLang prefill that was not aborted ends with finish_reason length, whatever the first token
// is (0.5.23, process_disagg_prefill_inflight_queue in disaggregation/prefill.py). An abort shows
// as finish_reason abort, error or none, or at /v1/messages as stop_reason end_turn
// (STOP_REASON_MAP in entrypoints/anthropic/serving.py). If it comes while the engine writes its
// KV, the answer may look as if nothing had happened (SGLang issue 33507): only the caller can see
// that the prefill engine reports fewer PromptTokens than the decode engine.
func (p *Profile) ReadEarlyProbe(answer []byte) (ProbeAnswer, error) {
	a := ProbeAnswer{CachedTokens: -1}
	if len(answer) > MaxProbeAnswer {
		return a, fmt.Errorf("%w: its answer has %d bytes, more than %d", ErrPrefillFailed, len(answer), MaxProbeAnswer)
	}
	isStream := p.Connector == SGLang && !bytes.HasPrefix(bytes.TrimSpace(answer), []byte("{"))
	if isStream {
		for line := range bytes.Lines(answer) {
			data, isData := bytes.CutPrefix(line, []byte("data:"))
			data = bytes.TrimSpace(data)
			if !isData || string(data) == "[DONE]" {
				continue
			}
			if err := a.addPart(data); err != nil {
				return a, err
			}
		}
	} else if err := a.addPart(answer); err != nil {
		return a, err
	}
	switch a.FinishReason {
	case "", "abort", "error":
		return a, fmt.Errorf("%w: finish_reason is %s", ErrPrefillFailed, shownFinishReason(a.FinishReason))
	}
	return a, nil
}

// addPart adds the values in part, an answer or one event of it. A value that part lacks stays.
func (a *ProbeAnswer) addPart(part []byte) error {
	members, err := scanAnswer(part)
	if err != nil {
		return fmt.Errorf("%w: its answer is not JSON: %w", ErrPrefillFailed, err)
	}
	if members.err != nil && !rawjson.IsNull(members.err) {
		return fmt.Errorf("%w: %w", ErrPrefillFailed, &SaidError{part})
	}
	if members.inner != nil { // the values are in or beside this member
		if err := a.addPart(members.inner); err != nil {
			return err
		}
	}
	read := members.probeAnswer()
	// Only /v1/messages has stop_reason here. A prefill that was not aborted ends with max_tokens,
	// which is read as length. For an abort, SGLang reports another reason.
	hasStopReason := len(members.stopReason) > 0 && !rawjson.IsNull(members.stopReason)
	wasAborted := hasStopReason && read.FinishReason != "length"
	if wasAborted {
		return fmt.Errorf("%w: stop_reason is not max_tokens", ErrPrefillFailed)
	}
	if read.PromptTokens > 0 {
		a.PromptTokens = read.PromptTokens
	}
	if read.CachedTokens >= 0 {
		a.CachedTokens = read.CachedTokens
	}
	if read.PromptTokenIDs != nil {
		a.PromptTokenIDs = read.PromptTokenIDs
	}
	if read.FinishReason != "" {
		a.FinishReason, a.Aborted = read.FinishReason, read.Aborted
	}
	return nil
}
