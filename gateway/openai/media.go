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

// A media URL must be a data: URL, or name a host that the operator trusts, because both engines
// fetch it from inside the cluster's network, at different times. Content that is a string has no
// media.
func (p *parser) checkContent(v json.RawMessage) *Error {
	check := (*parser).checkPart
	if p.req.Endpoint == mooncake.Messages {
		check = (*parser).checkBlock
	}
	if isObject(v) {
		if refusal := check(p, v); refusal != nil {
			return refusal.prefixParam(".")
		}
		return nil
	}
	index := 0
	for part := range rawjson.Elements(v) {
		if isObject(part) { // a string has no medium
			if refusal := check(p, part); refusal != nil {
				return refusal.prefixParam(fmt.Sprintf("[%d].", index))
			}
		}
		index++
	}
	return nil
}

// Other types are refused, because a later version of an engine may do more with them, such as
// fetch a URL.
var partTypes = []string{
	"text", "input_text", "output_text", "refusal", "thinking", "tool_reference",
	"image_url", "input_image", "audio_url", "input_audio", "video_url", "file_url",
}

// checkPart refuses tensors, and overwrites with blanks the name by which an engine would take the
// medium from its cache. It adds the bytes of a medium to mediaBytes.
func (p *parser) checkPart(part json.RawMessage) *Error {
	kind := ""
	hasName, hasMedium := false, false
	var unknownType *Error // returned only without a more precise error
	for key, v := range rawjson.Members(part) {
		switch key {
		case "type":
			if isNull(v) {
				continue
			}
			if !isString(v) {
				return wrongValue(key, v, isString, "a string")
			}
			kind = rawjson.Unquote(v)
			// A repeated key is checked each time, because a parser may take any value.
			if unknownType == nil && !slices.Contains(partTypes, kind) {
				unknownType = badRequest(CodeUnsupported, key, "a part of type %q is not supported", shorten(kind))
			}
		case "image_url", "audio_url", "video_url", "file_url":
			if isNull(v) {
				continue
			}
			if refusal := p.checkMedium(key, v); refusal != nil {
				return refusal
			}
			hasMedium = true
		case "input_audio":
			if isNull(v) {
				continue
			}
			if !isObject(v) {
				return wrongValue(key, v, isObject, "an object with data and format")
			}
			p.mediaBytes += len(v)
			hasMedium = true
		case "uuid":
			hasName = true
		case "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil":
			return badRequest(CodeUnsupported, key, "%q is not supported: engines do not load tensors that clients send", key)
		}
	}
	if unknownType != nil {
		return unknownType
	}
	if kind == "input_image" {
		kind = "image_url" // the key of an input_image
	}
	needsMedium := strings.HasSuffix(kind, "_url") || kind == "input_audio"
	if needsMedium && !hasMedium {
		return badRequest(CodeMissing, kind, "the part has no %q; send the medium itself", kind)
	}
	if hasName {
		// vLLM finds a medium in its cache by this name alone, so a client could name another client's
		// medium. Without a name, vLLM uses the content.
		rawjson.Blank(part, func(key string) bool { return key == "uuid" })
	}
	return nil
}

// The value is the URL, or an object with it. With any other, the engine would fail, or use a
// medium from its cache.
func (p *parser) checkMedium(key string, v json.RawMessage) *Error {
	if isString(v) {
		return p.checkMediaURL(key, v)
	}
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object with a url, or a URL")
	}
	found := false
	for inner, address := range rawjson.Members(v) {
		if inner != "url" { // a parser may take any of repeated keys
			continue
		}
		if !isString(address) {
			return wrongValue(key+".url", address, isString, "a URL")
		}
		found = true
		if refusal := p.checkMediaURL(inner, address); refusal != nil {
			return refusal.prefixParam(key + ".")
		}
	}
	if !found {
		return badRequest(CodeMissing, key+".url", "%q has no url; send the medium itself", key)
	}
	return nil
}

func (p *parser) checkMediaURL(param string, v json.RawMessage) *Error {
	if bytes.HasPrefix(v, []byte(`"data:`)) {
		p.mediaBytes += len(v)
		return nil
	}
	if !p.mayFetch(rawjson.Unquote(v)) {
		return badRequest(CodeInvalidValue, param, "media must come as a data: URL%s", p.hostsHint())
	}
	return nil
}

// mayFetch refuses a URL that parsers could read as different hosts.
func (p *parser) mayFetch(text string) bool {
	if strings.ContainsAny(text, "\\ \t\r\n") {
		return false
	}
	address, err := url.Parse(text)
	if err != nil || address.User != nil { // a parser could take a user for the host
		return false
	}
	if address.Scheme != "http" && address.Scheme != "https" {
		return false
	}
	return slices.ContainsFunc(p.limits.MediaHosts, func(host string) bool { return strings.EqualFold(host, address.Host) })
}

// hostsHint is the end of an error message.
func (p *parser) hostsHint() string {
	if len(p.limits.MediaHosts) == 0 {
		return ""
	}
	return " or from " + strings.Join(p.limits.MediaHosts, ", ")
}
