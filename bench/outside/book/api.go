package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// describe makes a chapter of an OpenAPI document.
func describe(source []byte) ([]byte, error) {
	doc, err := openapi3.NewLoader().LoadFromData(source)
	if err != nil {
		return nil, err
	}
	if err := doc.Validate(context.Background()); err != nil {
		return nil, err
	}
	var s strings.Builder
	fmt.Fprintf(&s, "# %s\n\n%s\n\n", doc.Info.Title, doc.Info.Description)
	for _, tag := range doc.Tags {
		fmt.Fprintf(&s, "## %s\n\n%s\n\n", tag.Name, tag.Description)
		for _, path := range doc.Paths.InMatchingOrder() {
			operations := doc.Paths.Value(path).Operations()
			for _, method := range slices.Sorted(maps.Keys(operations)) {
				if op := operations[method]; slices.Contains(op.Tags, tag.Name) {
					describeOperation(&s, method, path, op)
				}
			}
		}
	}
	s.WriteString("## Schemas\n\n")
	for _, name := range slices.Sorted(maps.Keys(doc.Components.Schemas)) {
		schema := doc.Components.Schemas[name].Value
		fmt.Fprintf(&s, "### %s\n\n%s\n\n", name, schema.Description)
		describeFields(&s, schema)
	}
	return []byte(s.String()), nil
}

func describeOperation(s *strings.Builder, method, path string, op *openapi3.Operation) {
	fmt.Fprintf(s, "### %s %s\n\n%s\n\n%s\n\n", method, path, op.Summary, op.Description)
	if len(op.Parameters) > 0 {
		s.WriteString("| parameter | in | meaning |\n|---|---|---|\n")
		for _, p := range op.Parameters {
			fmt.Fprintf(s, "| `%s` | %s | %s |\n", p.Value.Name, p.Value.In, cell(p.Value.Description))
		}
		s.WriteByte('\n')
	}
	if op.RequestBody != nil {
		for _, kind := range slices.Sorted(maps.Keys(op.RequestBody.Value.Content)) {
			body := op.RequestBody.Value.Content[kind]
			fmt.Fprintf(s, "Body, `%s`: %s\n\n", kind, nameOf(body.Schema))
			if body.Schema != nil && body.Schema.Ref == "" {
				describeFields(s, body.Schema.Value)
			}
		}
	}
	s.WriteString("| status | answer |\n|---|---|\n")
	for _, status := range slices.Sorted(maps.Keys(op.Responses.Map())) {
		r := op.Responses.Value(status).Value
		says := ""
		if r.Description != nil {
			says = cell(*r.Description)
		}
		for _, kind := range slices.Sorted(maps.Keys(r.Content)) {
			says += fmt.Sprintf(" `%s`: %s", kind, nameOf(r.Content[kind].Schema))
		}
		fmt.Fprintf(s, "| %s | %s |\n", status, says)
	}
	s.WriteByte('\n')
	describeHeaders(s, op)
}

// describeHeaders lists the headers of an operation's answers, each once.
func describeHeaders(s *strings.Builder, op *openapi3.Operation) {
	headers := map[string]string{}
	for _, r := range op.Responses.Map() {
		for name, h := range r.Value.Headers {
			headers[name] = h.Value.Description
		}
	}
	if len(headers) == 0 {
		return
	}
	s.WriteString("| header of the answer | meaning |\n|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		fmt.Fprintf(s, "| `%s` | %s |\n", name, cell(headers[name]))
	}
	s.WriteByte('\n')
}

// describeFields lists an object's fields.
func describeFields(s *strings.Builder, schema *openapi3.Schema) {
	if len(schema.Properties) == 0 {
		return
	}
	s.WriteString("| field | type | meaning |\n|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
		p := schema.Properties[name]
		must := ""
		if slices.Contains(schema.Required, name) {
			must = ", always there"
		}
		if p.Value.Nullable {
			must = ", or null" + must
		}
		fmt.Fprintf(s, "| `%s` | %s%s | %s |\n", name, nameOf(p), must, cell(p.Value.Description))
	}
	s.WriteByte('\n')
}

// nameOf is a schema's name with a link to it, or its type.
func nameOf(ref *openapi3.SchemaRef) string {
	switch {
	case ref == nil || ref.Value == nil:
		return "anything"
	case ref.Ref != "":
		name := ref.Ref[strings.LastIndexByte(ref.Ref, '/')+1:]
		return "[" + name + "](#" + strings.ToLower(name) + ")"
	case len(ref.Value.AllOf) == 1: // a schema of another name, described here
		return nameOf(ref.Value.AllOf[0])
	case ref.Value.Type.Is("array"):
		return "list of " + nameOf(ref.Value.Items)
	case ref.Value.Type == nil:
		return "anything"
	case ref.Value.Type.Is("object") && ref.Value.AdditionalProperties.Schema != nil:
		return "map of " + nameOf(ref.Value.AdditionalProperties.Schema)
	}
	return strings.Join(ref.Value.Type.Slice(), " or ")
}

// cell keeps a text inside its cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", "\\|", "\n", " ").Replace(strings.TrimSpace(text))
}
