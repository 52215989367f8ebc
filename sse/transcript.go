package sse

import "evenkeel/internal/rawjson"

// Transcript records what the client got of one engine's answer, so that another engine can
// continue it.
type Transcript struct {
	KeepText   bool
	KeepPrompt bool

	Content  bool   // text, reasoning or a tool call
	MoreThan bool   // more than plain text: reasoning or a tool call
	Unread   bool   // an event could not be read, so a part of the answer may be missing
	Guessed  bool   // Completed is partly estimated from chunks
	Grows    Growth // of /generate

	Head      Head
	IDs       []int32 // of the generated tokens, in order
	Shown     int     // number of IDs up to the last event with text; the client has seen their text
	Text      []byte  // escaped as inside a JSON string
	PromptIDs []byte  // the JSON list, as the engine sent it
	Runes     int     // of the text
	Prompt    int     // tokens as the decode engine counted them; 0: it sent no count
	Completed int     // tokens as the engine counted them

	// Spans is weight_versions of an engine that was told to end its answer. It may also tell of
	// tokens after those of the transcript. Empty: not told, because that comes only at the end.
	Spans []byte

	Last      []byte // the last event of /generate; empty: another endpoint, or no event came
	textBytes int    // of the text in Last, as a JSON string
}

// Growth says whether each event of /generate has the whole answer so far or only the new part.
type Growth uint8

// A stream's first event with tokens is the same for both, so it does not show which one applies.
const (
	GrowthUnknown Growth = iota
	Cumulative
	Delta // the engine runs with --incremental-streaming-output
)

// Head holds the members that all events of an answer share, as JSON; nil: the engine sent none.
type Head struct {
	ID, Created, Model, Fingerprint []byte
	Mode                            []byte // output_mode of /inference/v1/generate
}

// Reset empties the transcript for another answer and reuses its memory.
func (t *Transcript) Reset(keepText bool) {
	*t = Transcript{KeepText: keepText, IDs: t.IDs[:0], Text: t.Text[:0], Last: t.Last[:0], Spans: t.Spans[:0]}
}

// Exact says whether the id of every token is known.
func (t *Transcript) Exact() bool { return !t.Unread && len(t.IDs) == t.Completed }

// Cut drops the tokens after Shown. The client has not seen their text, so the next engine
// generates them again.
func (t *Transcript) Cut() {
	t.IDs = t.IDs[:t.Shown]
	t.Completed = t.Shown
}

// maxHead bounds a head, in bytes, because it is copied into each event of the engine that
// continues.
const maxHead = 4 << 10

// readHead copies the head into one piece of memory. One that is too long is left out, so the
// answer cannot be continued.
func readHead(b []byte) (h Head) {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "id":
			h.ID = o.Value()
		case "request_id": // of /inference/v1/generate
			if h.ID == nil {
				h.ID = o.Value()
			}
		case "output_mode":
			h.Mode = o.Value()
		case "created":
			h.Created = o.Value()
		case "model":
			h.Model = o.Value()
		case "system_fingerprint":
			h.Fingerprint = o.Value()
		}
	}
	size := len(h.ID) + len(h.Created) + len(h.Model) + len(h.Fingerprint) + len(h.Mode)
	if size > maxHead {
		return Head{}
	}
	buf := make([]byte, 0, size)
	for _, v := range []*[]byte{&h.ID, &h.Created, &h.Model, &h.Fingerprint, &h.Mode} {
		if from := len(buf); *v != nil {
			buf = append(buf, *v...)
			*v = buf[from:len(buf):len(buf)]
		}
	}
	return h
}

// runes counts the runes of s, which is escaped as inside a JSON string. A surrogate pair counts as
// one.
func runes(s []byte) (n int) {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c&0xC0 == 0x80: // a later byte of a rune in UTF-8
		case c != '\\':
			n++
		case i+5 < len(s) && s[i+1] == 'u':
			// \uD800 to \uDBFF
			firstOfPair := (s[i+2]|0x20) == 'd' && s[i+3] >= '8' && (s[i+3] <= '9' || (s[i+3]|0x20) <= 'b')
			if !firstOfPair {
				n++
			}
			i += len(`u0000`)
		default:
			n++
			i++
		}
	}
	return n
}

// Continuation describes what earlier engines have sent. With it, the filter edits the next
// engine's events so that the client sees one answer: no second role, the first engine's head, and
// usage and text offsets of the whole answer.
type Continuation struct {
	Head   Head
	Prompt int // of the client's own prompt; 0: not known, this engine's count less Tokens is used
	Tokens int
	Runes  int // of the text

	Spans []byte // weight_versions at /inference/v1/generate; empty: not told

	Last  []byte // the last event of /generate; nil: another endpoint
	Grows Growth
}

// addEarlier: this engine's prompt included the tokens of earlier engines.
func (c *Continuation) addEarlier(u Usage) Usage {
	u.Prompt -= c.Tokens
	if c.Prompt > 0 {
		u.Prompt = c.Prompt
	}
	u.Completion += c.Tokens
	u.Total = u.Prompt + u.Completion
	return u
}

// Ending appends a stream that is only the end of an answer: the finish_reason if any, the usage
// and [DONE]. A caller feeds it to a filter to end an answer that no engine needs to continue.
func Ending(dst []byte, chat bool, h Head, finish string, u Usage) []byte {
	if finish != "" {
		dst = h.openEvent(dst, chat)
		if chat {
			dst = append(dst, `{"index":0,"delta":{}`...)
		} else {
			dst = append(dst, `{"index":0,"text":""`...)
		}
		dst = rawjson.AppendString(append(dst, `,"logprobs":null,"finish_reason":`...), finish)
		dst = append(dst, `,"stop_reason":null}]}`+"\n\n"...)
	}
	dst = append(h.openEvent(dst, chat), `],"usage":`...) // the list of choices stays empty
	var otherCounts map[string]int
	return append(append(u.appendJSON(dst, otherCounts), "}\n\n"...), Done...)
}

// openEvent leaves the list of choices and the event open.
func (h *Head) openEvent(dst []byte, chat bool) []byte {
	object := `"text_completion"`
	if chat {
		object = `"chat.completion.chunk"`
	}
	dst = append(dst, "data: {"...)
	for _, m := range []struct {
		key string
		val []byte
	}{{"id", h.ID}, {"object", []byte(object)}, {"created", h.Created}, {"model", h.Model}, {"system_fingerprint", h.Fingerprint}} {
		if m.val != nil {
			dst = append(appendKey(dst, m.key), m.val...)
		}
	}
	return append(appendKey(dst, "choices"), '[')
}
