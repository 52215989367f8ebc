package sse

import "evenkeel/internal/rawjson"

// Trail is what is kept of a leg so that another can go on with its answer.
// The mirror adds what reaches the client, event by event; it
// allocates only where the trail grows.
type Trail struct {
	KeepText   bool // keep Text as well
	KeepPrompt bool // keep PromptIDs as well

	Head      Head
	IDs       []int32 // of the tokens, in order
	Shown     int     // how many of IDs came up to the last event that had text
	Text      []byte  // the content as it stands inside a JSON string
	PromptIDs []byte  // the list of the prompt's token ids, as an event had it
	Runes     int     // of the content
	Content   bool    // an event said something
	MoreThan  bool    // more than plain text was said: reasoning, a tool call
	Unread    bool    // an event was not understood, so something may be missing
	Prompt    int     // tokens of the prompt as decode counted them; 0: it did not say
	Completed int     // tokens by the engine's count
	Guessed   bool    // the engine did not count all tokens: Completed is partly estimated from chunks

	HandBack []byte // kv_transfer_params of an event: where the engine keeps the KV of the answer

	Last      []byte // the last event of /generate
	Grows     Growth // whether events of /generate have all tokens so far or only new ones
	textBytes int    // bytes of the text of the last such event, as a JSON string
}

// Growth says whether each event of a stream of /generate has all of the answer so far or only what is new.
type Growth uint8

// The growths. The first event with tokens does not show which of them a stream has.
const (
	GrowthUnknown Growth = iota
	AllSoFar
	OnlyNew // --incremental-streaming-output
)

// Head is what the events of an answer have in common, each as JSON; nil where
// the engine sent none.
type Head struct {
	ID, Created, Model, Fingerprint []byte
	Mode                            []byte // the output_mode of /inference/v1/generate
}

// Reset empties the trail; it keeps its memory.
func (t *Trail) Reset(keepText bool) {
	*t = Trail{KeepText: keepText, IDs: t.IDs[:0], Text: t.Text[:0], Last: t.Last[:0], HandBack: t.HandBack[:0]}
}

// Exact tells whether every token of the leg is known by its id.
func (t *Trail) Exact() bool { return !t.Unread && len(t.IDs) == t.Completed }

// Cut forgets the tokens behind Shown, whose text a client has not seen: the
// next leg makes them anew.
func (t *Trail) Cut() {
	t.IDs = t.IDs[:t.Shown]
	t.Completed = t.Shown
}

// readHead copies the head of an event into one piece of memory.
func readHead(b []byte) (h Head) {
	o := rawjson.ObjectAt(b, rawjson.Space(b, 0))
	for o.NextValue() {
		switch string(o.Key) {
		case "id":
			h.ID = o.Value()
		case "request_id":
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
	own := make([]byte, 0, len(h.ID)+len(h.Created)+len(h.Model)+len(h.Fingerprint)+len(h.Mode))
	for _, v := range []*[]byte{&h.ID, &h.Created, &h.Model, &h.Fingerprint, &h.Mode} {
		if from := len(own); *v != nil {
			own = append(own, *v...)
			*v = own[from:len(own):len(own)]
		}
	}
	return h
}

// runes counts the runes of a JSON string's inside. Half a surrogate pair
// counts with its other half.
func runes(s []byte) (n int) {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c&0xC0 == 0x80: // inside a rune
		case c != '\\':
			n++
		case i+5 < len(s) && s[i+1] == 'u':
			if high := (s[i+2]|0x20) == 'd' && s[i+3] >= '8' && (s[i+3] <= '9' || (s[i+3]|0x20) <= 'b'); !high {
				n++
			}
			i += 5
		default:
			n++
			i++
		}
	}
	return n
}

// Seam is where a resumed leg joins the answer it goes on with. Its events then
// say what the client would have read had the answer not been interrupted: no
// second role, the first leg's head, the usage of both, positions in the whole
// text.
type Seam struct {
	Head   Head
	Prompt int // tokens of the client's own prompt; 0: not known, the leg's count less Tokens is taken
	Tokens int // tokens that the legs before generated
	Runes  int // runes of the text that the legs before generated

	Last  []byte // the last event of the legs before, of /generate; nil: the endpoint is another one
	Grows Growth
}

// join adds the tokens of the legs before to a leg's usage.
func (s *Seam) join(u Usage) Usage {
	u.Prompt -= s.Tokens
	if s.Prompt > 0 {
		u.Prompt = s.Prompt
	}
	u.Completion += s.Tokens
	u.Total = u.Prompt + u.Completion
	return u
}

// Ending appends a leg that has nothing but its end: the finish_reason, unless
// it is empty, the usage and [DONE]. A mirror makes it the end of an answer.
func Ending(dst []byte, chat bool, h Head, finish string, u Usage) []byte {
	if finish != "" {
		dst = h.open(dst, chat)
		if chat {
			dst = append(dst, `{"index":0,"delta":{}`...)
		} else {
			dst = append(dst, `{"index":0,"text":""`...)
		}
		dst = rawjson.AppendString(append(dst, `,"logprobs":null,"finish_reason":`...), finish)
		dst = append(dst, `,"stop_reason":null}]}`+"\n\n"...)
	}
	dst = append(h.open(dst, chat), `],"usage":`...)
	return append(append(u.appendJSON(dst, nil), "}\n\n"...), Done...)
}

// open appends an event up to its first choice.
func (h *Head) open(dst []byte, chat bool) []byte {
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
