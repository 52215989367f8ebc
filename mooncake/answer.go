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
	// ErrNoHandoff means that the prefill engine answered 200, but keeps no KV blocks for a decode engine. If FinishReason is "stop",
	// the first token ended the answer. Otherwise the engine preempted the request and gave its blocks to another request, and a new
	// probe may succeed.
	ErrNoHandoff = errors.New("mooncake: the prefill engine returned no hand-off")
	// ErrBadHandoff means that the answer has no hand-off that is valid for this connector.
	ErrBadHandoff = errors.New("mooncake: the prefill engine returned a malformed hand-off")
)

const (
	// MaxProbeAnswer bounds the answer of a probe, in bytes: the token ids of a prompt of
	// a million tokens take about 7 MB.
	MaxProbeAnswer = 16 << 20
	// maxHandoff bounds the hand-off in the answer, in bytes: the block ids of a million
	// tokens take about 100 KB.
	maxHandoff = 1 << 20
	// maxName bounds each name in a hand-off, in bytes: the host, the engine's id and the request's id.
	maxName = 512
)

// ProbeAnswer is the answer of a prefill engine to a probe, the request that makes it run prefill.
type ProbeAnswer struct {
	KV             json.RawMessage // the hand-off, copied byte for byte from the answer
	PromptTokens   int             // tokens of the prompt, possibly one less than the decode engine's count; 0: not reported
	CachedTokens   int             // tokens of the prompt found in the prefix cache; -1: not reported
	PromptTokenIDs json.RawMessage // JSON list that points into the answer; nil: not reported
	FinishReason   string
	Aborted        bool   // the engine was told to end the prefill: the FinishReason is abort, and not with the status of an error
	EngineID       string // id of the engine that keeps the blocks; empty: not reported

	// ReusesRequestID says that the decode request must have the X-Request-Id of the probe. The decode engine uses its own request's id
	// to tell the prefill engine that it has pulled the KV, or into which blocks to write the KV. The prefill engine finds its request
	// only by the same id, because the hand-off has no request id or the engine ignores it. With another id, the prefill engine would
	// keep its blocks until the hold timeout or, if it pushes, write nothing.
	ReusesRequestID bool
}

// ReadProbe reads the JSON of an answer with status 200 to a probe. It checks the types of the hand-off's members, but allows unknown
// members, because each engine version has others. With vllm-mooncake, the answer has no hand-off, and ReadProbe makes one from info; other
// connectors need no info. knownHost says whether a hand-off may send a decode engine to a host; nil: to no host. With ErrNoHandoff, the
// ProbeAnswer is valid except for the hand-off.
func (p *Profile) ReadProbe(answer []byte, info *BootstrapInfo, knownHost func(host string) bool) (ProbeAnswer, error) {
	if len(answer) > MaxProbeAnswer {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer has %d bytes, more than %d", ErrBadHandoff, len(answer), MaxProbeAnswer)
	}
	members, err := scanAnswer(answer)
	if err != nil {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer is not JSON: %w", ErrBadHandoff, err)
	}
	if members.err != nil && !rawjson.IsNull(members.err) { // some endpoints send an error with status 200
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
	if p.Connector != Opaque { // the members of an opaque hand-off are not known, so neither are its hosts
		if err := p.checkHosts(kv, knownHost); err != nil {
			return answered, err
		}
	}
	answered.KV, answered.EngineID = bytes.Clone(kv), stringValue(h.engineID)
	return answered, nil
}

// setBootstrapHandoff sets the hand-off of an answer with connector vllm-mooncake. The answer itself has none, so it is made from info.
func (a *ProbeAnswer) setBootstrapHandoff(info *BootstrapInfo) error {
	isComplete := info != nil && info.TransferID != "" && info.BootstrapAddr != "" && info.EngineID != ""
	if !isComplete {
		return fmt.Errorf("%w: the exchange lacks transfer id, bootstrap address or engine id; query the bootstrap server "+
			"first", ErrBadHandoff)
	}
	if a.FinishReason != "length" { // the engine keeps the KV only for a request that ended at its token limit
		return fmt.Errorf("%w: finish_reason is %s", ErrNoHandoff, shownFinishReason(a.FinishReason))
	}
	a.KV, a.EngineID = info.handoff(), info.EngineID
	return nil
}

// SaidError is an error that an engine sent with status 200. SGLang does so because it begins a stream before it checks the
// request (0.5.23, http_server.py).
type SaidError struct {
	Answer []byte // the answer, or the event with the error; points into the caller's buffer
}

func (e *SaidError) Error() string {
	return "an error came with status 200; the engine's log says which" // the answer is not quoted, because it may repeat the prompt
}

// answerMembers holds the JSON values of those members of an answer that evenkeel reads; nil: the answer has no such member.
type answerMembers struct {
	err, kv, usage, choices, promptIDs, status, stopReason json.RawMessage

	inner json.RawMessage // an event's member response, message or delta, which may contain more of the members above
}

// scanAnswer checks that an answer is valid JSON, and finds the members that evenkeel reads. If a key is repeated, its last value counts,
// as in Body.Get.
func scanAnswer(answer []byte) (s answerMembers, err error) {
	members := 0
	_, err = rawjson.Scan(answer, 0, func(at rawjson.Place) string {
		if members++; members > maxMembers {
			return tooManyMembers // Scan fails with this text
		}
		value := json.RawMessage(answer[at.Val:at.ValEnd:at.ValEnd])
		switch string(rawjson.KeyText(answer[at.Key+1 : at.KeyEnd-1])) {
		case "error":
			s.err = value
		case "kv_transfer_params":
			s.kv = value
		case "usage":
			s.usage = value
		case "meta_info": // member of answers of SGLang's /generate
			if value[0] == '{' {
				s.usage = value
			}
		case "choices":
			s.choices = value
		case "status": // member of answers of /v1/responses
			s.status = value
		case "stop_reason": // member of answers of /v1/messages
			s.stopReason = value
		case "response", "message", "delta": // members of events of /v1/responses and /v1/messages
			if value[0] == '{' { // with another value, it contains no members
				s.inner = value
			}
		case "prompt_token_ids": // member of answers of chat; a completion has it in its choice
			s.promptIDs = value
		}
		return ""
	})
	return s, err
}

// probeAnswer returns a ProbeAnswer with the values that scanAnswer found. Each endpoint has its own names for the same values, and an
// answer has only the names of its endpoint.
func (s *answerMembers) probeAnswer() ProbeAnswer {
	a := ProbeAnswer{CachedTokens: -1, PromptTokenIDs: tokenList(s.promptIDs)}
	a.readUsage(s.usage)
	if choices := rawjson.ArrayAt(s.choices, 0); choices.Next() { // the answer to a probe has one choice
		ids := json.RawMessage(nil) // the prompt's token ids in the choice, where a completion has them
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
	switch string(s.status) { // set in answers of /v1/responses only
	case `"incomplete"`:
		a.FinishReason = "length"
	case `"completed"`:
		a.FinishReason = "stop"
	}
	switch string(s.stopReason) { // set in answers of /v1/messages only
	case "", "null": // not reported
	case `"max_tokens"`, `"stop_sequence"`: // the stop string that evenkeel adds to a probe counts as the token limit
		a.FinishReason = "length"
	default:
		a.FinishReason = "stop"
	}
	return a
}

// readUsage reads the token counts from the member usage of an answer, or from SGLang's meta_info, which also has the finish_reason.
func (a *ProbeAnswer) readUsage(usage json.RawMessage) {
	readFromCache, writtenToCache := 0, 0 // prompt tokens that input_tokens does not include at /v1/messages
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
		case "finish_reason": // in meta_info, it is an object
			hasStatus := false
			for key, value := range rawjson.Members(value) {
				switch key {
				case "type":
					a.FinishReason = finishReason(value)
				case "status_code": // SGLang gives it to the aborts of its own (0.5.23, FINISH_ABORT in managers/schedule_batch.py)
					hasStatus = !rawjson.IsNull(value)
				}
			}
			a.Aborted = a.FinishReason == "abort" && !hasStatus
		case "prompt_tokens_details", "input_tokens_details":
			a.CachedTokens = -1 // not reported, unless the details have the count
			for key, value := range rawjson.Members(value) {
				if key == "cached_tokens" {
					a.CachedTokens = tokenCount(value)
				}
			}
		}
	}
	a.PromptTokens += readFromCache + writtenToCache
}

// tokenCount reads a number of tokens. It returns -1, which means "not reported", if the value is not a whole number.
func tokenCount(value json.RawMessage) int {
	if n, ok := rawjson.Int(value, 0, len(value)); ok { // the whole text of value is the number
		return n
	}
	return -1
}

// finishReason returns a finish_reason without its quotes. It allocates nothing for "length", with which most probes end.
func finishReason(value json.RawMessage) string {
	if string(value) == `"length"` {
		return "length"
	}
	return stringValue(value)
}

// handoff is a parsed kv_transfer_params. The fields from doPrefill on are the values of the members that a decode engine uses; nil: there
// is no such member.
type handoff struct {
	members int // how many members the object has

	doPrefill, mode, blockIDs, engineID, host, requestID, port json.RawMessage
}

// readHandoff parses a kv_transfer_params, which the caller has checked to be valid JSON. ok is false if it is not an object, or has too
// many members. If a key is repeated, its last value counts.
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

// checkHandoff checks the members that a decode engine uses. With connector opaque they are not known, so the hand-off only must not be
// empty. The hosts are left to checkHosts.
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

// checkSource checks the members that say where the KV is: the blocks, and the engine, host, port and request that have them. The host
// may still be an unknown one, which checkHosts refuses.
func (h *handoff) checkSource() error {
	switch n, ok := countBlocks(h.blockIDs); {
	case !ok:
		return fmt.Errorf("%w: remote_block_ids is %s, not a list of block numbers or a list of such lists", ErrBadHandoff,
			describeValue(h.blockIDs))
	case n == 0: // the request was preempted and lost its blocks; an empty list would crash the decode engine
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

// matchesByRequestID says whether the prefill and the decode engine match their two requests by the X-Request-Id, so that the decode
// request must have that of the probe. Otherwise they match by the request id in the hand-off or, with connector opaque, in a way that is
// not known.
func (p *Profile) matchesByRequestID(h *handoff) bool {
	switch p.Connector {
	case Opaque: // the members of its hand-offs are not known
		return false
	case NIXLPush: // its engines ignore the id in the hand-off
		return true
	}
	return h.requestID == nil // vllm-ascend before 0.14 and NIXL in vLLM before 0.13 send no request id in the hand-off
}

// checkTransferMode refuses a hand-off of the other of the two NIXL connectors, one of which pulls and one pushes. With it, each engine
// would wait for the other, and the decode request would never end. vLLM before 0.32 sends no transfer_mode, so it cannot be checked there.
func (p *Profile) checkTransferMode(h *handoff) error {
	if h.mode == nil || !p.nixl() {
		return nil
	}
	pushes := string(h.mode) == `"push"`
	if pushes == (p.Connector == NIXLPush) { // the engine does what the profile says
		return nil
	}
	runs, wanted := "NixlConnector", NIXLPull
	if pushes {
		runs, wanted = "NixlPushConnector", NIXLPush
	}
	return fmt.Errorf("%w: the engine runs %s; set connector: %s in the profile of both engines", ErrBadHandoff, runs, wanted)
}

// isName says whether a value is a string that is not empty and has at most maxName bytes.
func isName(raw json.RawMessage) bool {
	if len(raw) <= len(`""`) || raw[0] != '"' { // missing, empty or not a string
		return false
	}
	n := len(raw) - len(`""`)
	if bytes.IndexByte(raw, '\\') >= 0 { // only a string with escapes has to be decoded to count its bytes
		n = len(rawjson.Unquote(raw))
	}
	return n <= maxName
}

// countBlocks counts the block numbers in a list, or in a list that has one list per KV cache group; ok is false for any other value.
func countBlocks(ids json.RawMessage) (n int, ok bool) {
	if len(ids) == 0 || ids[0] != '[' {
		return 0, false
	}
	flat, nested := 0, 0 // block numbers outside of inner lists, and inner lists
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
	return n + flat, flat == 0 || nested == 0 // with both, it is neither a list of numbers nor one of lists
}

// isBlockNumber says whether an element of a JSON array is a block number: digits only, so no sign, fraction or exponent.
func isBlockNumber(raw json.RawMessage) bool {
	for _, c := range raw {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// stringValue returns the text of a JSON string; empty: the value is missing or not a string.
func stringValue(raw json.RawMessage) string {
	if len(raw) == 0 || raw[0] != '"' {
		return ""
	}
	return rawjson.Unquote(raw)
}

// tokenList returns raw if it is a list; nil: it is missing, or not a list. The elements of the list are not checked.
func tokenList(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 || raw[0] != '[' {
		return nil
	}
	return raw
}

// ErrPrefillFailed says that a prefill engine answered 200 but did not finish the prompt, so
// the KV that it wrote to the decode engine may be incomplete.
var ErrPrefillFailed = errors.New("mooncake: the prefill engine did not finish the prompt")

// ReadEarlyProbe reads an answer with status 200 to an EarlyProbe: a probe whose request was bound to its decode rank before the prefill
// (early binding). The answer is JSON, or a stream of events from SGLang. The error wraps ErrPrefillFailed. With an error, the ProbeAnswer
// has what was read before the error.
//
// An SGLang prefill that was not aborted ends with finish_reason length, whatever the first token is (0.5.23,
// process_disagg_prefill_inflight_queue in disaggregation/prefill.py). An abort is noticed in one of three ways:
//   - The finish_reason is abort or error, or is missing, which is checked below.
//   - At /v1/messages, the stop_reason is end_turn (STOP_REASON_MAP in entrypoints/anthropic/serving.py), which addPart refuses.
//   - If the abort comes while the engine writes its KV, the answer may look as if nothing had happened (SGLang issue 33507). Only the
//     caller can notice it: the prefill engine then reports fewer PromptTokens than the decode engine.
func (p *Profile) ReadEarlyProbe(answer []byte) (ProbeAnswer, error) {
	a := ProbeAnswer{CachedTokens: -1}
	if len(answer) > MaxProbeAnswer {
		return a, fmt.Errorf("%w: its answer has %d bytes, more than %d", ErrPrefillFailed, len(answer), MaxProbeAnswer)
	}
	// An answer of SGLang is a stream of events, unless it begins with a brace: it is then one JSON object.
	isStream := p.Connector == SGLang && !bytes.HasPrefix(bytes.TrimSpace(answer), []byte("{"))
	if isStream {
		for line := range bytes.Lines(answer) {
			data, isData := bytes.CutPrefix(line, []byte("data:"))
			data = bytes.TrimSpace(data)
			if !isData || string(data) == "[DONE]" { // a line of an event without data, or the end of the stream
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

// addPart adds to a the values in part, which is an answer or one event of an answer. A value that part lacks stays as an earlier event
// reported it. addPart fails if part is not JSON, is an error, or shows that the prefill was aborted.
func (a *ProbeAnswer) addPart(part []byte) error {
	members, err := scanAnswer(part)
	if err != nil {
		return fmt.Errorf("%w: its answer is not JSON: %w", ErrPrefillFailed, err)
	}
	if members.err != nil && !rawjson.IsNull(members.err) {
		return fmt.Errorf("%w: %w", ErrPrefillFailed, &SaidError{part})
	}
	if members.inner != nil { // an event of /v1/responses or /v1/messages, whose values are inside or beside this member
		if err := a.addPart(members.inner); err != nil {
			return err
		}
	}
	read := members.probeAnswer()
	// Only answers of /v1/messages have stop_reason at this place. A prefill asks for one token. If it was not aborted, it ends with
	// max_tokens, which is read as length. If it was aborted, SGLang reports another reason.
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
