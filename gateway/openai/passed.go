package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"slices"
	"strconv"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// passedRules are the rules for a request that one engine serves whole. All other keys
// are left to the engine.
var passedRules = map[string]rule{
	"model":                model,
	"tools":                nil, // not searched for media: a tool's parameter may have the name of a media key
	"priority":             rules["priority"],
	"prompt_embeds":        rules["prompt_embeds"],
	"chat_template":        chatTemplate,
	"chat_template_kwargs": chatTemplateArgs,
}

// ParsePassed reads and checks the body of a request that goes to one engine as it came, without
// the keys that no client may set. The request points into raw.
func ParsePassed(raw []byte, lim Limits) (*Request, *Error) {
	return parsePassed(raw, lim, mooncake.Chat, passedRules)
}

// parsePassed is ParsePassed with these rules, for a body whose messages have the form of the endpoint ep.
func parsePassed(raw []byte, lim Limits, ep mooncake.Endpoint, rules map[string]rule) (*Request, *Error) {
	body, err := mooncake.ScanBody(raw, lim.MaxDepth)
	if err != nil {
		return nil, bad(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	p := parser{lim: lim, req: &Request{Endpoint: ep, Body: body, N: 1}}
	for key, v := range body.All() {
		rule, ok := rules[key]
		if (ok || mooncake.Reserved(key)) && body.Count(key) > 1 {
			return nil, bad(CodeDuplicateKey, key, "the key %q appears more than once; send it once", key)
		}
		var e *Error
		switch {
		case rule != nil:
			e = rule(&p, key, v)
		case !ok:
			e = p.mediaIn(key, v)
		}
		if e != nil {
			return nil, e
		}
	}
	p.req.PromptBytes = len(raw) - p.mediaBytes
	return p.req, p.named()
}

// named sets the model of a request that names none, if there is only one model, as engines do (vLLM 0.33, _is_model_supported in
// entrypoints/serve/engine/serving.py). If there are several models, it refuses the request, because no engine could be chosen for it.
func (p *parser) named() *Error {
	if p.req.Model == "" && p.lim.Sole != nil {
		if p.req.Model = p.lim.Sole(); p.req.Model != "" && p.req.Body.Raw() != nil {
			name, _ := json.Marshal(p.req.Model) // strings always marshal
			p.req.Body.Set("model", name)
		}
	}
	if p.req.Model == "" {
		return bad(CodeMissing, "model", "the request names no model; set \"model\"")
	}
	return nil
}

// mediaIn checks the media that stand anywhere in a value, because the engine would fetch them
// from inside the cluster's network. A plugin of the engine may fetch what the key data names.
func (p *parser) mediaIn(path string, v json.RawMessage) *Error {
	if _, e := p.mediaAt(v, 0, path == "data"); e != nil {
		return e.under(path)
	}
	return nil
}

// mediaAt checks the value at i, and returns the position after it. So each byte is read
// once, however deep it stands.
func (p *parser) mediaAt(b json.RawMessage, i int, data bool) (end int, e *Error) {
	switch {
	case b[i] == '{':
		return p.mediaOf(b, i, data)
	case b[i] == '[':
		a := rawjson.ArrayAt(b, i)
		for a.Next() {
			if c := b[a.Val]; c != '{' && c != '[' && !data { // numbers and strings need no check; a list of token ids is long
				continue
			}
			if a.Pos, e = p.mediaAt(b, a.Val, data); e != nil {
				return 0, e.under("[" + strconv.Itoa(a.N-1) + "]")
			}
		}
		return a.Pos, nil
	}
	end = rawjson.ValueEnd(b, i)
	if data && b[i] == '"' {
		e = p.datum(rawjson.Unquote(b[i:end]))
	}
	return end, e
}

// mediaOf is mediaAt for an object. The object may be a part of a message, and any member may have parts.
func (p *parser) mediaOf(b json.RawMessage, i int, data bool) (end int, e *Error) {
	o, part := rawjson.ObjectAt(b, i), false
	for o.Next() {
		key, counted := rawjson.Key(o.Key), p.mediaBytes
		if o.Pos, e = p.mediaAt(b, o.Val, data); e != nil {
			return 0, e.under(shorten(key))
		}
		switch v := o.Value(); {
		case mediaKeys[key]:
			part, p.mediaBytes = true, counted // the part counts all of it
		case key == "type" && isString(v):
			kind := rawjson.Unquote(v)
			part = part || mediaKeys[kind] || kind == "input_image"
		case data && strings.HasSuffix(key, "data_format") && !isNull(v):
			if !isString(v) || !slices.Contains(dataFormats, rawjson.Unquote(v)) {
				return 0, bad(CodeUnsupported, shorten(key), "%q must be one of %s", shorten(key), strings.Join(dataFormats, ", "))
			}
		}
	}
	if part {
		e = p.part(b[i:o.Pos])
	}
	return o.Pos, e
}

// dataFormats are the formats of data that are allowed. With other formats, a plugin reads or writes files on the engine's machine.
var dataFormats = []string{"b64_json", "base64", "bytes", "url"}

// datum checks a string under the key data.
func (p *parser) datum(text string) *Error {
	jpeg := strings.HasPrefix(text, "/9j/") && !strings.Contains(text, ".") // the base64 of a JPEG begins so
	switch {
	case strings.HasPrefix(text, "/") && !jpeg, strings.HasPrefix(strings.ToLower(text), "file:"):
		return bad(CodeInvalidValue, "", "data must not name a file of the engine's machine; send what is in it")
	case strings.Contains(text, "://") && !p.allowed(text):
		return bad(CodeInvalidValue, "", "data must not name an address%s", p.orFrom())
	}
	return nil
}

// mediaKeys are the keys under which a part of a message has a medium.
var mediaKeys = map[string]bool{
	"image_url": true, "audio_url": true, "video_url": true, "file_url": true, "input_audio": true,
	"image_embeds": true, "audio_embeds": true, "video_embeds": true, "image_pil": true, "prompt_embeds": true,
}

// maxFields bounds the fields of a form, and maxFieldBytes the bytes of a field that is not a file.
const (
	maxFields     = 64
	maxFieldBytes = 64 << 10
)

// ParseForm reads and checks a form with files, which goes to one engine byte for byte, even if it names no model. So a
// field that no client may set is refused here, while such a key is dropped from a JSON body.
func ParseForm(raw []byte, contentType string, lim Limits) (*Request, *Error) {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return nil, bad(CodeInvalidType, "", "the body must be a form; send Content-Type: multipart/form-data with its boundary")
	}
	p := parser{lim: lim, req: &Request{N: 1, PromptBytes: len(raw)}}
	parts := multipart.NewReader(bytes.NewReader(raw), params["boundary"])
	seen := map[string]bool{}
	for n := 0; ; n++ {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return p.req, p.named()
		}
		if err != nil {
			return nil, bad(CodeInvalidValue, "", "the form cannot be read: it is cut off, or its boundary is not the one of Content-Type")
		}
		if n == maxFields {
			return nil, bad(CodeInvalidValue, "", "the form has more than %d fields", maxFields)
		}
		if e := p.field(part, seen); e != nil {
			return nil, e
		}
	}
}

// field checks one field of a form.
func (p *parser) field(part *multipart.Part, seen map[string]bool) *Error {
	if e := plainHeaders(part.Header); e != nil {
		return e
	}
	name := part.FormName()
	if name == "" || strings.Contains(part.Header.Get("Content-Disposition"), "name*") { // another parser might read another name
		return bad(CodeInvalidValue, "", "a field of the form has no plain name")
	}
	if mooncake.Reserved(name) {
		return bad(CodeUnsupported, name, "%q is not supported: it belongs to the proxy", shorten(name))
	}
	if part.FileName() != "" {
		if name == "model" {
			return bad(CodeInvalidType, name, "%q is a file; it must be the name of a model", name)
		}
		return nil
	}
	value, err := io.ReadAll(io.LimitReader(part, maxFieldBytes+1))
	if err != nil || len(value) > maxFieldBytes {
		return bad(CodeInvalidValue, shorten(name), "the field %q is cut off, or has more than %d bytes", shorten(name), maxFieldBytes)
	}
	if name != "model" && name != "stream" {
		return nil
	}
	if seen[name] {
		return bad(CodeDuplicateKey, name, "the field %q appears more than once; send it once", name)
	}
	seen[name] = true
	if name == "model" {
		p.req.Model = string(value)
		return nil
	}
	p.req.Stream, _ = strconv.ParseBool(string(value)) // the engine judges a word that is not a boolean
	return nil
}

// plainHeaders refuses headers of a field that parsers may read differently: if a header
// comes twice, some parsers take the first and others the last.
func plainHeaders(h map[string][]string) *Error {
	for name, values := range h {
		switch {
		case name != "Content-Disposition" && name != "Content-Type" && name != "Content-Transfer-Encoding":
			return bad(CodeUnsupported, "", "a field of the form has the header %q; send Content-Disposition and Content-Type only", shorten(name))
		case len(values) > 1:
			return bad(CodeDuplicateKey, "", "a field of the form has the header %q more than once; send it once", name)
		}
	}
	return nil
}
