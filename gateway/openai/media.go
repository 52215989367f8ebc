package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// content checks the parts of a message. Both engines fetch a media URL, from
// inside the cluster's network and at different times: it must be a data: URL
// or name a host that the operator trusts.
func (p *parser) content(v json.RawMessage) *Error {
	check := (*parser).part
	if p.req.Endpoint == mooncake.Messages {
		check = (*parser).block
	}
	if isObject(v) {
		if e := check(p, v); e != nil {
			return e.within(".")
		}
		return nil
	}
	n := 0
	for part := range rawjson.Elements(v) {
		if isObject(part) {
			if e := check(p, part); e != nil {
				return e.within(fmt.Sprintf("[%d].", n))
			}
		}
		n++
	}
	return nil
}

// partTypes are the types that a part may have. Other types are refused, because it is
// not known what a later engine would do with them.
var partTypes = []string{
	"text", "input_text", "output_text", "refusal", "thinking", "tool_reference",
	"image_url", "input_image", "audio_url", "input_audio", "video_url", "file_url",
}

func (p *parser) part(part json.RawMessage) *Error {
	named, kind, media := false, "", ""
	var strange *Error // returned only if no key gives a more precise error
	for key, v := range rawjson.Members(part) {
		switch key {
		case "type":
			if isNull(v) {
				continue
			}
			if !isString(v) {
				return wrong(key, v, isString, "a string")
			}
			if kind = rawjson.Unquote(v); strange == nil && !slices.Contains(partTypes, kind) { // of repeated keys, a parser may take any
				strange = bad(CodeUnsupported, key, "a part of type %q is not supported", shorten(kind))
			}
		case "image_url", "audio_url", "video_url", "file_url":
			if isNull(v) {
				continue
			}
			if e := p.media(key, v); e != nil {
				return e
			}
			media = key
		case "input_audio":
			if isNull(v) {
				continue
			}
			if !isObject(v) {
				return wrong(key, v, isObject, "an object with data and format")
			}
			p.mediaBytes += len(v)
			media = key
		case "uuid":
			named = true
		case "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil":
			return bad(CodeUnsupported, key, "%q is not supported: engines do not load tensors that clients send", key)
		}
	}
	if strange != nil {
		return strange
	}
	if kind == "input_image" {
		kind = "image_url" // the key that has the URL of an input_image
	}
	if media == "" && (strings.HasSuffix(kind, "_url") || kind == "input_audio") {
		return bad(CodeMissing, kind, "the part has no %q; send the medium itself", kind)
	}
	if named {
		// vLLM finds a medium in its cache by this name alone, whichever client gave it: a
		// client could name the medium of another client. Without a name, vLLM uses the content.
		rawjson.Blank(part, func(key string) bool { return key == "uuid" })
	}
	return nil
}

// media checks a medium's URL, which stands alone or in an object. With any other value,
// the engine would use a medium that it has in its cache, or fail.
func (p *parser) media(key string, v json.RawMessage) *Error {
	if isString(v) { // the short form
		return p.mediaURL(key, v)
	}
	if !isObject(v) {
		return wrong(key, v, isObject, "an object with a url, or a URL")
	}
	found := false
	for inner, u := range rawjson.Members(v) {
		if inner != "url" { // each of repeated keys: a parser may take any
			continue
		}
		if !isString(u) {
			return wrong(key+".url", u, isString, "a URL")
		}
		found = true
		if e := p.mediaURL(inner, u); e != nil {
			return e.within(key + ".")
		}
	}
	if !found {
		return bad(CodeMissing, key+".url", "%q has no url; send the medium itself", key)
	}
	return nil
}

func (p *parser) mediaURL(param string, v json.RawMessage) *Error {
	if bytes.HasPrefix(v, []byte(`"data:`)) {
		p.mediaBytes += len(v)
		return nil
	}
	if !p.allowed(rawjson.Unquote(v)) {
		return bad(CodeInvalidValue, param, "media must come as a data: URL%s", p.orFrom())
	}
	return nil
}

// allowed says whether a URL names one of MediaHosts. It refuses a URL that parsers could read as different hosts.
func (p *parser) allowed(text string) bool {
	if strings.ContainsAny(text, "\\ \t\r\n") {
		return false
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return false
	}
	return slices.ContainsFunc(p.lim.MediaHosts, func(host string) bool { return strings.EqualFold(host, u.Host) })
}

func (p *parser) orFrom() string {
	if len(p.lim.MediaHosts) == 0 {
		return ""
	}
	return " or from " + strings.Join(p.lim.MediaHosts, ", ")
}
